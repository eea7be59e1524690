//! Conversions between `f32` and the five 8-bit formats, as in torch: to nearest, ties to even.

use std::sync::LazyLock;

/// Layout of an 8-bit format with a sign.
pub(super) struct Layout {
    /// Bits of the mantissa.
    mantissa: u32,
    /// Bias of the exponent.
    bias: i32,
    /// Code of the largest finite value.
    largest: u32,
    /// Code for values beyond the largest one: infinity, or not a number.
    beyond: u8,
    /// Code for not a number.
    nan: u8,
    /// True if zero has no sign.
    one_zero: bool,
}

pub(super) const E4M3FN: Layout =
    Layout { mantissa: 3, bias: 7, largest: 0x7e, beyond: 0x7f, nan: 0x7f, one_zero: false };
pub(super) const E5M2: Layout =
    Layout { mantissa: 2, bias: 15, largest: 0x7b, beyond: 0x7c, nan: 0x7f, one_zero: false };
pub(super) const E4M3FNUZ: Layout =
    Layout { mantissa: 3, bias: 8, largest: 0x7f, beyond: 0x80, nan: 0x80, one_zero: true };
pub(super) const E5M2FNUZ: Layout =
    Layout { mantissa: 2, bias: 16, largest: 0x7f, beyond: 0x80, nan: 0x80, one_zero: true };

/// Value of each code of one format.
pub(super) type Table = LazyLock<[f32; 256]>;

pub(super) static E4M3FN_VALUES: Table = LazyLock::new(|| E4M3FN.values());
pub(super) static E5M2_VALUES: Table = LazyLock::new(|| E5M2.values());
pub(super) static E4M3FNUZ_VALUES: Table = LazyLock::new(|| E4M3FNUZ.values());
pub(super) static E5M2FNUZ_VALUES: Table = LazyLock::new(|| E5M2FNUZ.values());

impl Layout {
    fn values(&self) -> [f32; 256] {
        std::array::from_fn(|code| self.decode(code as u8))
    }

    fn decode(&self, code: u8) -> f32 {
        let (sign, rest) = (code & 0x80, u32::from(code & 0x7f));
        if self.one_zero && code == self.nan {
            return f32::NAN;
        }
        let magnitude = if rest > self.largest {
            if code & 0x7f == self.beyond && self.beyond != self.nan { f32::INFINITY } else { f32::NAN }
        } else {
            let (exponent, fraction) = (rest >> self.mantissa, rest & ((1 << self.mantissa) - 1));
            let (exponent, fraction) = match exponent {
                0 => (1, fraction),
                _ => (exponent, fraction | 1 << self.mantissa),
            };
            fraction as f32 * 2f32.powi(exponent.cast_signed() - self.bias - self.mantissa.cast_signed())
        };
        if sign == 0 { magnitude } else { -magnitude }
    }

    pub(super) fn encode(&self, value: f32) -> u8 {
        if value.is_nan() {
            return self.nan;
        }
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        let magnitude = f64::from(value.abs());
        // Infinity has the exponent 1024, which is beyond the largest code in every format.
        let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(1 - self.bias);
        if exponent > 127 {
            return self.overflow(sign);
        }
        let units = (magnitude / 2f64.powi(exponent - self.mantissa.cast_signed())).round_ties_even() as u32;
        // A value that rounds up to the next power of two carries into the exponent.
        let code = ((exponent + self.bias - 1).cast_unsigned() << self.mantissa) + units;
        match code {
            0 if self.one_zero => 0,
            _ if code > self.largest => self.overflow(sign),
            _ => code as u8 | sign,
        }
    }

    fn overflow(&self, sign: u8) -> u8 {
        if self.one_zero { self.beyond } else { self.beyond | sign }
    }
}

/// Encodes a value as [`E4M3FN`] does. Written without a branch, so that it vectorises. Not a
/// number keeps its sign, as in torch.
pub(crate) fn to_e4m3fn(value: f32) -> u8 {
    let bits = value.to_bits();
    let (sign, magnitude) = (bits >> 24 & 0x80, bits & 0x7fff_ffff);
    // Adding 2^14 rounds a value below 2^-6 to a multiple of 2^-9, the least code.
    let large = 141 << 23;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(large)).to_bits().wrapping_sub(large);
    let normal = (magnitude + 0x7_ffff + (magnitude >> 20 & 1)).wrapping_sub(120 << 23) >> 20;
    let code = if magnitude < 121 << 23 { subnormal } else { normal.min(0x7f) };
    (sign | code) as u8
}

/// Returns the value of a code of `float8_e8m0fnu`: a power of two.
pub(super) fn decode_e8m0(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(0x0040_0000),
        0xff => f32::NAN,
        _ => f32::from_bits(u32::from(code) << 23),
    }
}

/// Returns the code of `float8_e8m0fnu` for the magnitude of a value.
pub(super) fn encode_e8m0(value: f32) -> u8 {
    let bits = value.to_bits();
    let exponent = (bits >> 23 & 0xff) as u8;
    let half = bits & 0x40_0000 != 0;
    let more = bits & 0x3f_ffff != 0;
    match exponent {
        0xff => 0xff,
        _ if half && (more || exponent > 0) => exponent + 1,
        _ => exponent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The nearest code by search over all values, ties to the even code.
    fn nearest(layout: &Layout, value: f32) -> u8 {
        let codes = (0..=layout.largest as u8).map(|code| (code, f64::from(layout.decode(code))));
        let distance = |at: f64| (at - f64::from(value.abs())).abs();
        let best = codes.fold((0u8, f64::INFINITY), |(best, least), (code, at)| {
            let away = distance(at);
            if away < least || (away == least && code % 2 == 0) { (code, away) } else { (best, least) }
        });
        best.0
    }

    #[test]
    fn every_code_comes_back_and_values_between_round_to_nearest() {
        for layout in [&E4M3FN, &E5M2, &E4M3FNUZ, &E5M2FNUZ] {
            for code in 0..=255u8 {
                let value = layout.decode(code);
                if value.is_nan() {
                    assert_eq!(layout.encode(value), layout.nan);
                } else {
                    assert_eq!(layout.encode(value), code, "{value}");
                }
            }
            let largest = layout.decode(layout.largest as u8);
            let mut rng = mooncake_core::clock::Rng::seeded(mooncake_core::testkit::test_seed());
            for _ in 0..20_000 {
                let value = f32::from_bits(rng.next_u64() as u32).abs();
                if value <= largest {
                    assert_eq!(layout.encode(value), nearest(layout, value), "{value:e}");
                }
            }
            assert_eq!(layout.encode(largest * 1.5), layout.beyond);
            assert_eq!(layout.encode(f32::INFINITY), layout.beyond);
        }
    }

    #[test]
    fn the_encoder_without_a_branch_has_the_same_codes() {
        let check = |value: f32| {
            let (code, wanted) = (to_e4m3fn(value), E4M3FN.encode(value));
            assert!(code == wanted || value.is_nan() && code | 0x80 == 0xff, "{value:e} {code} {wanted}");
        };
        // All values of 16 bits, which have the middle of each pair of codes among them, and beside
        // them.
        for high in 0..=u32::from(u16::MAX) {
            for low in [0, 1, 0x8000, 0xffff] {
                check(f32::from_bits(high << 16 | low));
            }
        }
    }

    #[test]
    fn known_values() {
        assert_eq!([E4M3FN.decode(0x7e), E5M2.decode(0x7b)], [448.0, 57344.0]);
        assert_eq!([E4M3FNUZ.decode(0x7f), E5M2FNUZ.decode(0x7f)], [240.0, 57344.0]);
        assert_eq!([E4M3FN.decode(1), E5M2.decode(0x7c)], [2f32.powi(-9), f32::INFINITY]);
        for code in 0..=254 {
            assert_eq!(encode_e8m0(decode_e8m0(code)), code);
        }
        assert_eq!([encode_e8m0(3.0), encode_e8m0(-2.9), encode_e8m0(f32::INFINITY)], [129, 128, 255]);
    }
}
