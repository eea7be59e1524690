//! Reduction of tensors: element-wise, over the inputs of all ranks at once.
//!
//! The inputs are folded in their order, so that every rank that folds the same inputs in the same
//! order has the same bits. Floats of 16 and 8 bits are added up in `f32` and rounded once.
//! Integers wrap. Of booleans, sum and maximum are *or*, product and minimum are *and*. A minimum
//! or maximum is not a number if one of its inputs is not, as with `torch.minimum`.

mod float8;

pub(crate) use float8::to_e4m3fn;
use half::{bf16, f16};
use mooncake_core::{Error, ErrorCode, Result};

use crate::dtype::DType;

/// Operator of a reduction, with the numbers of `torch.distributed.ReduceOp`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum ReduceOp {
    /// Sum.
    Sum = 0,
    /// Sum divided by the number of inputs. Integers are divided towards zero.
    Avg = 1,
    /// Product.
    Product = 2,
    /// Minimum.
    Min = 3,
    /// Maximum.
    Max = 4,
    /// Bits that are set in all inputs.
    BitAnd = 5,
    /// Bits that are set in any input.
    BitOr = 6,
    /// Bits that are set in an odd number of inputs.
    BitXor = 7,
}

impl ReduceOp {
    /// Every operator, in the order of the numbers.
    pub const ALL: [ReduceOp; 8] = [
        ReduceOp::Sum,
        ReduceOp::Avg,
        ReduceOp::Product,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::BitAnd,
        ReduceOp::BitOr,
        ReduceOp::BitXor,
    ];

    /// Returns the operator with this number.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for a number that no operator has.
    pub fn from_code(code: u8) -> Result<Self> {
        Self::ALL.get(usize::from(code)).copied().ok_or_else(|| {
            Error::invalid(format!("cannot read reduction operator: unknown number. number={code}"))
        })
    }
}

/// Number of elements that are folded at a time. Their sums stay in the first-level cache.
const BLOCK: usize = 1024;

type Kernel = fn(&[&[u8]], &mut [u8]);

/// Operator on an element type.
#[derive(Clone, Copy, Debug)]
pub struct Reduction {
    dtype: DType,
    op: ReduceOp,
    kernel: Kernel,
}

impl PartialEq for Reduction {
    fn eq(&self, other: &Self) -> bool {
        (self.dtype, self.op) == (other.dtype, other.op)
    }
}

impl Reduction {
    /// Selects the operator on the element type.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` if the operator has no meaning on the type: bits of floats, an order of
    /// complex numbers, an average of booleans.
    pub fn new(dtype: DType, op: ReduceOp) -> Result<Self> {
        let kernel = kernel(dtype, op).ok_or_else(|| {
            let dtype = dtype.name();
            let text = format!("cannot reduce: operator has no meaning on this type. op={op:?} type={dtype}");
            Error::new(ErrorCode::NotSupported, text)
        })?;
        Ok(Self { dtype, op, kernel })
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the operator.
    pub fn op(&self) -> ReduceOp {
        self.op
    }

    /// Writes the reduction of all inputs to `out`. The bytes need no alignment.
    ///
    /// # Panics
    /// Without an input, or if an input has another length than `out`, or if that length is not
    /// whole elements.
    pub fn apply(&self, inputs: &[&[u8]], out: &mut [u8]) {
        assert!(!inputs.is_empty(), "a reduction needs an input");
        assert!(inputs.iter().all(|input| input.len() == out.len()), "inputs and result differ in length");
        assert!(out.len().is_multiple_of(self.dtype.bytes()), "an element is cut");
        (self.kernel)(inputs, out);
    }
}

/// Element as it lies in memory, and the form in which elements are folded.
trait Element<const N: usize> {
    type Folded: Copy;
    const ZERO: Self::Folded;
    fn load(bytes: &[u8; N]) -> Self::Folded;
    fn store(value: Self::Folded) -> [u8; N];
}

fn fold<const N: usize, E: Element<N>>(
    inputs: &[&[u8]],
    out: &mut [u8],
    step: impl Fn(E::Folded, E::Folded) -> E::Folded,
    finish: impl Fn(E::Folded) -> E::Folded,
) {
    let (out, _) = out.as_chunks_mut::<N>();
    let mut sums = [E::ZERO; BLOCK];
    for (index, out) in out.chunks_mut(BLOCK).enumerate() {
        let from = index * BLOCK;
        let sums = &mut sums[..out.len()];
        for (number, input) in inputs.iter().enumerate() {
            let (elements, _) = input.as_chunks::<N>();
            let elements = &elements[from..from + sums.len()];
            if number == 0 {
                for (sum, element) in sums.iter_mut().zip(elements) {
                    *sum = E::load(element);
                }
            } else {
                for (sum, element) in sums.iter_mut().zip(elements) {
                    *sum = step(*sum, E::load(element));
                }
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = E::store(finish(*sum));
        }
    }
}

macro_rules! plain_elements {
    ($($name:ident)*) => { $(
        impl Element<{ size_of::<$name>() }> for $name {
            type Folded = $name;
            const ZERO: $name = 0 as $name;

            fn load(bytes: &[u8; size_of::<$name>()]) -> $name {
                $name::from_ne_bytes(*bytes)
            }

            fn store(value: $name) -> [u8; size_of::<$name>()] {
                value.to_ne_bytes()
            }
        }
    )* };
}

plain_elements!(i8 u8 i16 u16 i32 u32 i64 u64 f32 f64);

/// Defines elements that are folded as `f32`.
macro_rules! narrow_elements {
    ($($name:ident: $bytes:literal, $load:expr, $store:expr;)*) => { $(
        impl Element<$bytes> for $name {
            type Folded = f32;
            const ZERO: f32 = 0.0;

            fn load(bytes: &[u8; $bytes]) -> f32 {
                ($load)(*bytes)
            }

            fn store(value: f32) -> [u8; $bytes] {
                ($store)(value)
            }
        }
    )* };
}

struct E4M3Fn;
struct E5M2;
struct E4M3Fnuz;
struct E5M2Fnuz;
struct E8M0;

narrow_elements! {
    f16: 2, |bytes| from_f16(u16::from_ne_bytes(bytes)), to_f16;
    bf16: 2, |bytes| f32::from_bits(u32::from(u16::from_ne_bytes(bytes)) << 16), to_bf16;
    E4M3Fn: 1, |[code]: [u8; 1]| float8::E4M3FN_VALUES[usize::from(code)], |value| [to_e4m3fn(value)];
    E5M2: 1, |[code]: [u8; 1]| float8::E5M2_VALUES[usize::from(code)], |value| [float8::E5M2.encode(value)];
    E4M3Fnuz: 1, |[code]: [u8; 1]| float8::E4M3FNUZ_VALUES[usize::from(code)],
        |value| [float8::E4M3FNUZ.encode(value)];
    E5M2Fnuz: 1, |[code]: [u8; 1]| float8::E5M2FNUZ_VALUES[usize::from(code)],
        |value| [float8::E5M2FNUZ.encode(value)];
    E8M0: 1, |[code]: [u8; 1]| float8::decode_e8m0(code), |value| [float8::encode_e8m0(value)];
}

/// Rounds to nearest, ties to even. Written without a branch, so that it vectorises.
pub(crate) fn to_bf16(value: f32) -> [u8; 2] {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let quiet = bits | 0x40_0000;
    ((if value.is_nan() { quiet } else { rounded } >> 16) as u16).to_ne_bytes()
}

/// Converts the bits of a half-precision float. Written without a branch, so that it vectorises;
/// the conversions of `half` choose an instruction of the processor for each element.
fn from_f16(bits: u16) -> f32 {
    let word = u32::from(bits) << 16;
    let (sign, twice) = (word & 0x8000_0000, word << 1);
    // The exponent moves by 224 at first, so that infinity becomes infinity, and then by -112.
    let normal = f32::from_bits((twice >> 4) + (0xe0 << 23)) * f32::from_bits(0x0780_0000);
    let subnormal = f32::from_bits((twice >> 17) | 126 << 23) - 0.5;
    let magnitude = if twice < 1 << 27 { subnormal } else { normal };
    f32::from_bits(sign | magnitude.to_bits())
}

/// Rounds to half precision, to nearest, ties to even. Written without a branch.
fn to_f16(value: f32) -> [u8; 2] {
    let bits = value.to_bits();
    let (sign, twice) = (bits >> 16 & 0x8000, bits << 1);
    // Too large values become infinity. Adding a power of two rounds the value to 10 bits.
    let scaled = value.abs() * f32::from_bits(0x7780_0000) * f32::from_bits(0x0880_0000);
    let rounding = f32::from_bits(((twice & 0xff00_0000).max(0x7100_0000) >> 1) + 0x0780_0000);
    let rounded = (scaled + rounding).to_bits();
    let magnitude = (rounded >> 13 & 0x7c00) + (rounded & 0x0fff);
    let magnitude = if twice > 0xff00_0000 { 0x7e00 } else { magnitude };
    ((sign | magnitude) as u16).to_ne_bytes()
}

/// Boolean in a byte: any other value than 0 is true.
struct Boolean;

impl Element<1> for Boolean {
    type Folded = u8;
    const ZERO: u8 = 0;

    fn load([byte]: &[u8; 1]) -> u8 {
        u8::from(*byte != 0)
    }

    fn store(value: u8) -> [u8; 1] {
        [value]
    }
}

/// Complex number: the real part, then the imaginary part.
struct Complex<F>(F);

macro_rules! complex_elements {
    ($($name:ident)*) => { $(
        impl Element<{ 2 * size_of::<$name>() }> for Complex<$name> {
            type Folded = [$name; 2];
            const ZERO: [$name; 2] = [0.0; 2];

            fn load(bytes: &[u8; 2 * size_of::<$name>()]) -> [$name; 2] {
                let (parts, _) = bytes.as_chunks::<{ size_of::<$name>() }>();
                [$name::from_ne_bytes(parts[0]), $name::from_ne_bytes(parts[1])]
            }

            fn store([re, im]: [$name; 2]) -> [u8; 2 * size_of::<$name>()] {
                let mut bytes = [0; 2 * size_of::<$name>()];
                let (parts, _) = bytes.as_chunks_mut::<{ size_of::<$name>() }>();
                (parts[0], parts[1]) = (re.to_ne_bytes(), im.to_ne_bytes());
                bytes
            }
        }
    )* };
}

complex_elements!(f32 f64);

fn kernel(dtype: DType, op: ReduceOp) -> Option<Kernel> {
    macro_rules! integer {
        ($t:ident) => {
            match op {
                ReduceOp::Sum => |i, o| fold::<_, $t>(i, o, $t::wrapping_add, |x| x),
                ReduceOp::Avg => |i, o| {
                    // At most 64 inputs: the number fits every type.
                    let count = i.len() as $t;
                    fold::<_, $t>(i, o, $t::wrapping_add, |x| x.wrapping_div(count));
                },
                ReduceOp::Product => |i, o| fold::<_, $t>(i, o, $t::wrapping_mul, |x| x),
                ReduceOp::Min => |i, o| fold::<_, $t>(i, o, $t::min, |x| x),
                ReduceOp::Max => |i, o| fold::<_, $t>(i, o, $t::max, |x| x),
                ReduceOp::BitAnd => |i, o| fold::<_, $t>(i, o, |a, b| a & b, |x| x),
                ReduceOp::BitOr => |i, o| fold::<_, $t>(i, o, |a, b| a | b, |x| x),
                ReduceOp::BitXor => |i, o| fold::<_, $t>(i, o, |a, b| a ^ b, |x| x),
            }
        };
    }
    macro_rules! float {
        ($t:ident, $folded:ident) => {
            match op {
                ReduceOp::Sum => |i, o| fold::<_, $t>(i, o, |a, b| a + b, |x| x),
                ReduceOp::Avg => |i, o| {
                    let count = i.len() as $folded;
                    fold::<_, $t>(i, o, |a, b| a + b, |x| x / count);
                },
                ReduceOp::Product => |i, o| fold::<_, $t>(i, o, |a, b| a * b, |x| x),
                // Not a number on either side is the result.
                ReduceOp::Min => {
                    |i, o| fold::<_, $t>(i, o, |a, b| if a.is_nan() || a < b { a } else { b }, |x| x)
                }
                ReduceOp::Max => {
                    |i, o| fold::<_, $t>(i, o, |a, b| if a.is_nan() || a > b { a } else { b }, |x| x)
                }
                ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => return None,
            }
        };
    }
    macro_rules! complex {
        ($t:ident) => {
            match op {
                ReduceOp::Sum => {
                    |i, o| fold::<_, Complex<$t>>(i, o, |a, b| [a[0] + b[0], a[1] + b[1]], |x| x)
                }
                ReduceOp::Avg => |i, o| {
                    let n = i.len() as $t;
                    fold::<_, Complex<$t>>(i, o, |a, b| [a[0] + b[0], a[1] + b[1]], |x| [x[0] / n, x[1] / n]);
                },
                ReduceOp::Product => |i, o| {
                    let times =
                        |a: [$t; 2], b: [$t; 2]| [a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]];
                    fold::<_, Complex<$t>>(i, o, times, |x| x);
                },
                _ => return None,
            }
        };
    }
    let kernel: Kernel = match dtype {
        DType::I8 => integer!(i8),
        DType::U8 => integer!(u8),
        DType::I16 => integer!(i16),
        DType::U16 => integer!(u16),
        DType::I32 => integer!(i32),
        DType::U32 => integer!(u32),
        DType::I64 => integer!(i64),
        DType::U64 => integer!(u64),
        DType::F16 => float!(f16, f32),
        DType::F32 => float!(f32, f32),
        DType::F64 => float!(f64, f64),
        DType::Bf16 => float!(bf16, f32),
        DType::F8E4M3Fn => float!(E4M3Fn, f32),
        DType::F8E5M2 => float!(E5M2, f32),
        DType::F8E4M3Fnuz => float!(E4M3Fnuz, f32),
        DType::F8E5M2Fnuz => float!(E5M2Fnuz, f32),
        DType::F8E8M0Fnu => float!(E8M0, f32),
        DType::Complex64 => complex!(f32),
        DType::Complex128 => complex!(f64),
        DType::Bool => match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr => {
                |i, o| fold::<_, Boolean>(i, o, |a, b| a | b, |x| x)
            }
            ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => {
                |i, o| fold::<_, Boolean>(i, o, |a, b| a & b, |x| x)
            }
            ReduceOp::BitXor => |i, o| fold::<_, Boolean>(i, o, |a, b| a ^ b, |x| x),
            ReduceOp::Avg => return None,
        },
    };
    Some(kernel)
}

#[cfg(test)]
mod tests;
