//! Type signatures: struct_pack's encoding of a message type, and the hash of it that opens each
//! body.
//!
//! The compiler computes everything here; at run time the hash of a message is a constant.

/// Signature of one type, one byte per symbol.
#[derive(Clone, Copy)]
pub struct TypeSignature {
    bytes: [u8; Self::CAPACITY],
    len: usize,
}

/// Symbols of the signatures in the table of messages.
pub(super) mod symbol {
    pub(crate) const I32: u8 = 1;
    pub(crate) const U32: u8 = 2;
    pub(crate) const I64: u8 = 3;
    pub(crate) const U64: u8 = 4;
    pub(crate) const U8: u8 = 6;
    pub(crate) const BOOL: u8 = 11;
    pub(crate) const CHAR: u8 = 12;
    pub(crate) const STRING: u8 = 128;
    pub(crate) const MAP: u8 = 130;
    pub(crate) const VECTOR: u8 = 132;
    pub(crate) const OPTIONAL: u8 = 133;
    pub(crate) const VARIANT: u8 = 134;
    pub(crate) const EXPECTED: u8 = 135;
    pub(crate) const VOID: u8 = 250;
    pub(crate) const STRUCT: u8 = 253;
    pub(crate) const END: u8 = 255;
    /// Base of small sizes and alignments: a number below 127 is written as this plus the number.
    pub(crate) const SIZE_BASE: u8 = 129;
}

impl TypeSignature {
    /// Maximum length of a signature. A longer one fails to compile.
    pub const CAPACITY: usize = 256;

    /// Signature of the argument list of a call without arguments.
    pub const EMPTY: Self = Self { bytes: [0; Self::CAPACITY], len: 0 };

    /// Creates a signature from its symbols.
    pub const fn new(symbols: &[u8]) -> Self {
        let mut signature = Self::EMPTY;
        let mut at = 0;
        while at < symbols.len() {
            signature = signature.push(symbols[at]);
            at += 1;
        }
        signature
    }

    /// Appends one symbol.
    pub const fn push(mut self, symbol: u8) -> Self {
        self.bytes[self.len] = symbol;
        self.len += 1;
        self
    }

    /// Appends all symbols of `other`.
    pub const fn then(mut self, other: TypeSignature) -> Self {
        let mut at = 0;
        while at < other.len {
            self = self.push(other.bytes[at]);
            at += 1;
        }
        self
    }

    /// Returns the signature of a struct or tuple with these fields.
    pub const fn structure(members: &[TypeSignature]) -> Self {
        let mut signature = Self::new(&[symbol::STRUCT]);
        let mut at = 0;
        while at < members.len() {
            signature = signature.then(members[at]);
            at += 1;
        }
        signature.push(symbol::END)
    }

    /// Returns the signature of a struct that is encoded as in memory, with this alignment.
    pub const fn aligned(members: &[TypeSignature], alignment: u8) -> Self {
        let mut signature = Self::structure(members);
        signature.len -= 1;
        let alignment = symbol::SIZE_BASE + alignment;
        signature.push(alignment).push(alignment).push(symbol::END)
    }

    /// Returns the signature of an argument list: empty, the single argument itself, or a tuple.
    pub const fn arguments(arguments: &[TypeSignature]) -> Self {
        match arguments {
            [] => Self::EMPTY,
            [one] => *one,
            many => Self::structure(many),
        }
    }

    /// Returns the symbols.
    pub const fn as_bytes(&self) -> &[u8] {
        self.bytes.split_at(self.len).0
    }

    /// Returns the first four bytes of a body of this type: MD5 with the last bit free to mark that
    /// a spelled-out signature follows.
    pub const fn hash(&self) -> u32 {
        md5_head(self.as_bytes()) & !1
    }
}

impl std::fmt::Debug for TypeSignature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.as_bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Returns the number of a function: four bytes of the MD5 of its qualified C++ name.
pub const fn function_id(name: &str) -> u32 {
    md5_head(name.as_bytes())
}

/// Returns the first four bytes of the MD5, read big-endian. Implemented here because no maintained
/// crate computes MD5 in a constant; the tests compare it with such a crate.
const fn md5_head(input: &[u8]) -> u32 {
    let mut state = [0x6745_2301u32, 0xefcd_ab89, 0x98ba_dcfe, 0x1032_5476];
    let padded = (input.len() + 9).div_ceil(64) * 64;
    let mut start = 0;
    while start < padded {
        let mut words = [0u32; 16];
        let mut at = 0;
        while at < 64 {
            words[at / 4] |= (padded_byte(input, start + at, padded) as u32) << (at % 4 * 8);
            at += 1;
        }
        state = md5_block(state, &words);
        start += 64;
    }
    state[0].swap_bytes()
}

/// Returns byte `at` of the padded message: 0x80, zeros and the length in bits follow the input.
const fn padded_byte(input: &[u8], at: usize, padded: usize) -> u8 {
    if at < input.len() {
        input[at]
    } else if at == input.len() {
        0x80
    } else if at >= padded - 8 {
        ((input.len() as u64 * 8) >> ((at - (padded - 8)) * 8)) as u8
    } else {
        0
    }
}

const fn md5_block(state: [u32; 4], words: &[u32; 16]) -> [u32; 4] {
    const SHIFTS: [[u32; 4]; 4] = [[7, 12, 17, 22], [5, 9, 14, 20], [4, 11, 16, 23], [6, 10, 15, 21]];
    let [mut a, mut b, mut c, mut d] = state;
    let mut step = 0;
    while step < 64 {
        let (mix, word) = match step / 16 {
            0 => ((b & c) | (!b & d), step),
            1 => ((d & b) | (!d & c), (5 * step + 1) % 16),
            2 => (b ^ c ^ d, (3 * step + 5) % 16),
            _ => (c ^ (b | !d), (7 * step) % 16),
        };
        let sum = a.wrapping_add(mix).wrapping_add(SINES[step]).wrapping_add(words[word]);
        (a, d, c) = (d, c, b);
        b = b.wrapping_add(sum.rotate_left(SHIFTS[step / 16][step % 4]));
        step += 1;
    }
    [state[0].wrapping_add(a), state[1].wrapping_add(b), state[2].wrapping_add(c), state[3].wrapping_add(d)]
}

/// Constants of MD5: floor(2^32 * |sin(i + 1)|).
const SINES: [u32; 64] = [
    0xd76a_a478,
    0xe8c7_b756,
    0x2420_70db,
    0xc1bd_ceee,
    0xf57c_0faf,
    0x4787_c62a,
    0xa830_4613,
    0xfd46_9501,
    0x6980_98d8,
    0x8b44_f7af,
    0xffff_5bb1,
    0x895c_d7be,
    0x6b90_1122,
    0xfd98_7193,
    0xa679_438e,
    0x49b4_0821,
    0xf61e_2562,
    0xc040_b340,
    0x265e_5a51,
    0xe9b6_c7aa,
    0xd62f_105d,
    0x0244_1453,
    0xd8a1_e681,
    0xe7d3_fbc8,
    0x21e1_cde6,
    0xc337_07d6,
    0xf4d5_0d87,
    0x455a_14ed,
    0xa9e3_e905,
    0xfcef_a3f8,
    0x676f_02d9,
    0x8d2a_4c8a,
    0xfffa_3942,
    0x8771_f681,
    0x6d9d_6122,
    0xfde5_380c,
    0xa4be_ea44,
    0x4bde_cfa9,
    0xf6bb_4b60,
    0xbebf_bc70,
    0x289b_7ec6,
    0xeaa1_27fa,
    0xd4ef_3085,
    0x0488_1d05,
    0xd9d4_d039,
    0xe6db_99e5,
    0x1fa2_7cf8,
    0xc4ac_5665,
    0xf429_2244,
    0x432a_ff97,
    0xab94_23a7,
    0xfc93_a039,
    0x655b_59c3,
    0x8f0c_cc92,
    0xffef_f47d,
    0x8584_5dd1,
    0x6fa8_7e4f,
    0xfe2c_e6e0,
    0xa301_4314,
    0x4e08_11a1,
    0xf753_7e82,
    0xbd3a_f235,
    0x2ad7_d2bb,
    0xeb86_d391,
];

#[cfg(test)]
mod tests {
    use super::*;
    use md5::{Digest, Md5};

    #[test]
    fn md5_agrees_with_the_crate_at_every_length_to_three_blocks() {
        let input: Vec<u8> = (0..200u32).map(|i| (i * 37 + 11) as u8).collect();
        for len in 0..=input.len() {
            let digest = Md5::digest(&input[..len]);
            let expected = u32::from_be_bytes([digest[0], digest[1], digest[2], digest[3]]);
            assert_eq!(md5_head(&input[..len]), expected, "length {len}");
        }
    }

    #[test]
    fn recorded_ids_and_hashes() {
        assert_eq!(function_id("mooncake::WrappedMasterService::ExistKey"), 0x8938_5f09);
        assert_eq!(TypeSignature::new(&[253, 128, 12, 128, 12, 255]).hash(), 0x7cf9_1ed8);
        assert_eq!(TypeSignature::new(&[135, 11, 1]).hash(), 0x90e8_00d2);
    }
}
