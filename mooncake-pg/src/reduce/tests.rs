//! Comparison of the kernels with plain arithmetic on one element at a time.

#![allow(clippy::print_stderr, reason = "seeds and measurements")]

use std::hint::black_box;

use mooncake_core::clock::{Clock, Rng, SystemClock};
use mooncake_core::testkit::test_seed;

use super::*;

fn rng() -> Rng {
    Rng::seeded(test_seed())
}

fn random(rng: &mut Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    rng.fill(&mut bytes);
    bytes
}

fn integer(dtype: DType, bytes: &[u8]) -> Option<i128> {
    macro_rules! read {
        ($t:ident) => {
            i128::from($t::from_ne_bytes(bytes.try_into().unwrap()))
        };
    }
    Some(match dtype {
        DType::I8 => read!(i8),
        DType::U8 => read!(u8),
        DType::I16 => read!(i16),
        DType::U16 => read!(u16),
        DType::I32 => read!(i32),
        DType::U32 => read!(u32),
        DType::I64 => read!(i64),
        DType::U64 => read!(u64),
        _ => return None,
    })
}

/// Keeps the low bytes of an integer and extends the sign, as an element of that type would.
fn wrapped(dtype: DType, value: i128) -> i128 {
    integer(dtype, &value.to_ne_bytes()[..dtype.bytes()]).unwrap()
}

fn float(dtype: DType, bytes: &[u8]) -> f64 {
    match dtype {
        DType::F16 => f16::from_ne_bytes(bytes.try_into().unwrap()).to_f64(),
        DType::Bf16 => bf16::from_ne_bytes(bytes.try_into().unwrap()).to_f64(),
        DType::F32 => f64::from(f32::from_ne_bytes(bytes.try_into().unwrap())),
        DType::F64 => f64::from_ne_bytes(bytes.try_into().unwrap()),
        DType::F8E4M3Fn => f64::from(float8::E4M3FN_VALUES[usize::from(bytes[0])]),
        DType::F8E5M2 => f64::from(float8::E5M2_VALUES[usize::from(bytes[0])]),
        DType::F8E4M3Fnuz => f64::from(float8::E4M3FNUZ_VALUES[usize::from(bytes[0])]),
        DType::F8E5M2Fnuz => f64::from(float8::E5M2FNUZ_VALUES[usize::from(bytes[0])]),
        DType::F8E8M0Fnu => f64::from(float8::decode_e8m0(bytes[0])),
        other => panic!("{other:?} is no float"),
    }
}

/// Half of the distance between neighbours near `value`, relative to it.
fn precision(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-14,
        DType::F32 => 1e-5,
        DType::F16 => 1.0 / 2048.0 + 1e-5,
        DType::Bf16 => 1.0 / 256.0 + 1e-5,
        DType::F8E4M3Fn | DType::F8E4M3Fnuz => 1.0 / 16.0 + 1e-5,
        DType::F8E5M2 | DType::F8E5M2Fnuz => 1.0 / 8.0 + 1e-5,
        _ => 0.51,
    }
}

fn reduce(dtype: DType, op: ReduceOp, inputs: &[Vec<u8>]) -> Vec<u8> {
    let mut out = vec![0; inputs[0].len()];
    let slices: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    Reduction::new(dtype, op).unwrap().apply(&slices, &mut out);
    out
}

#[test]
fn integers_agree_with_wide_arithmetic() {
    let mut rng = rng();
    for &dtype in DType::ALL.iter().filter(|dtype| integer(**dtype, &[0; 16][..dtype.bytes()]).is_some()) {
        for op in ReduceOp::ALL {
            for (ranks, count) in [(1, 5), (2, 1), (3, 1023), (5, 1024), (8, 2500)] {
                let inputs: Vec<_> = (0..ranks).map(|_| random(&mut rng, count * dtype.bytes())).collect();
                let out = reduce(dtype, op, &inputs);
                for (at, got) in out.chunks_exact(dtype.bytes()).enumerate() {
                    let range = at * dtype.bytes()..(at + 1) * dtype.bytes();
                    let values = inputs.iter().map(|input| integer(dtype, &input[range.clone()]).unwrap());
                    let sum = || values.clone().fold(0i128, |a, b| wrapped(dtype, a + b));
                    let expected = match op {
                        ReduceOp::Sum => sum(),
                        ReduceOp::Avg => sum() / ranks as i128,
                        ReduceOp::Product => values.fold(1, |a: i128, b| wrapped(dtype, a.wrapping_mul(b))),
                        ReduceOp::Min => values.min().unwrap(),
                        ReduceOp::Max => values.max().unwrap(),
                        ReduceOp::BitAnd => values.reduce(|a, b| a & b).unwrap(),
                        ReduceOp::BitOr => values.reduce(|a, b| a | b).unwrap(),
                        ReduceOp::BitXor => values.reduce(|a, b| a ^ b).unwrap(),
                    };
                    assert_eq!(integer(dtype, got), Some(expected), "{dtype:?} {op:?} {ranks} element {at}");
                }
            }
        }
    }
}

#[test]
fn floats_agree_with_double_precision() {
    let mut rng = rng();
    let floats = [8, 9, 10, 11, 13, 14, 15, 16, 17].map(|code| DType::from_code(code).unwrap());
    for dtype in floats {
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max] {
            let (ranks, count) = (1 + rng.below(8) as usize, rng.below(3000) as usize);
            let inputs: Vec<_> = (0..ranks).map(|_| random(&mut rng, count * dtype.bytes())).collect();
            let out = reduce(dtype, op, &inputs);
            for (at, got) in out.chunks_exact(dtype.bytes()).enumerate() {
                let range = at * dtype.bytes()..(at + 1) * dtype.bytes();
                let values: Vec<f64> =
                    inputs.iter().map(|input| float(dtype, &input[range.clone()])).collect();
                let (got, ranks) = (float(dtype, got), ranks as f64);
                let expected = match op {
                    ReduceOp::Sum => values.iter().sum(),
                    ReduceOp::Avg => values.iter().sum::<f64>() / ranks,
                    ReduceOp::Product if dtype == DType::F64 => values.iter().product(),
                    // Intermediate products may leave the range of `f32`.
                    ReduceOp::Product => f64::from(values.iter().fold(1f32, |a, b| a * *b as f32)),
                    _ if values.iter().any(|value| value.is_nan()) => f64::NAN,
                    ReduceOp::Min => values.iter().copied().reduce(f64::min).unwrap(),
                    _ => values.iter().copied().reduce(f64::max).unwrap(),
                };
                let context = || format!("{dtype:?} {op:?} {values:?}: {got:e} instead of {expected:e}");
                if matches!(op, ReduceOp::Min | ReduceOp::Max) {
                    assert!(got == expected || got.is_nan() && expected.is_nan(), "{}", context());
                    continue;
                }
                // Sums that cancel lose digits of their largest summand; results outside of the
                // range of the type are not compared.
                let scale = match op {
                    ReduceOp::Product => expected.abs(),
                    _ => values.iter().map(|value| value.abs()).sum::<f64>(),
                };
                let ordinary = dtype == DType::F64 || scale < 1e30 && expected.abs() > 1e-30;
                if scale.is_finite() && ordinary && got.is_finite() {
                    let lost = if op == ReduceOp::Product { 1e-5 } else { 1e-6 } * scale;
                    let lost = if dtype == DType::F64 { 1e-12 * scale } else { lost };
                    let small = if dtype == DType::F16 { 1e-7 } else { 1e-2 * f64::from(dtype.bytes() == 1) };
                    let allowed = expected.abs() * precision(dtype) + lost + small;
                    assert!((got - expected).abs() <= allowed, "{}", context());
                }
            }
        }
    }
}

#[test]
fn narrow_floats_are_rounded_once() {
    // 256 + 1 + 1 is 258 in f32. Rounded after each step, it would stay at 256 in bfloat16.
    let value = |x: f32| bf16::from_f32(x).to_ne_bytes().to_vec();
    let out = reduce(DType::Bf16, ReduceOp::Sum, &[value(256.0), value(1.0), value(1.0)]);
    assert_eq!(out, value(258.0));
    let value = |x: f32| f16::from_f32(x).to_ne_bytes().to_vec();
    let out = reduce(DType::F16, ReduceOp::Avg, &[value(60000.0), value(60000.0)]);
    assert_eq!(out, value(60000.0), "the sum exceeds the type, the average does not");
    for x in [0.0, -0.0, 1.0, 3.1875, f32::INFINITY, f32::NEG_INFINITY, 1e-40, 3.0e38] {
        assert_eq!(to_bf16(x), bf16::from_f32(x).to_ne_bytes(), "{x}");
    }
    let mut rng = rng();
    for _ in 0..100_000 {
        let x = f32::from_bits(rng.next_u64() as u32);
        assert_eq!(to_bf16(x), bf16::from_f32(x).to_ne_bytes(), "{x}");
        if !x.is_nan() {
            assert_eq!(to_f16(x), f16::from_f32(x).to_ne_bytes(), "{x}");
        }
    }
    for bits in 0..=u16::MAX {
        let (value, expected) = (from_f16(bits), f16::from_bits(bits).to_f32());
        assert!(value == expected || value.is_nan() && expected.is_nan(), "{bits:#x}");
        if !expected.is_nan() {
            // Values halfway between two neighbours, and the neighbours of these.
            let next = f16::from_bits(bits.wrapping_add(1)).to_f32();
            for x in
                [expected, (expected + next) / 2.0, f32::from_bits(((expected + next) / 2.0).to_bits() + 1)]
            {
                if !x.is_nan() {
                    assert_eq!(to_f16(x), f16::from_f32(x).to_ne_bytes(), "{x:e}");
                }
            }
        }
    }
    assert_eq!(u16::from_ne_bytes(to_f16(f32::NAN)), 0x7e00);
}

#[test]
fn complex_numbers_add_and_multiply_as_pairs() {
    let number = |re: f64, im: f64| [re.to_ne_bytes(), im.to_ne_bytes()].concat();
    let inputs = [number(1.0, 2.0), number(3.0, -1.0), number(0.5, 0.0)];
    assert_eq!(reduce(DType::Complex128, ReduceOp::Sum, &inputs), number(4.5, 1.0));
    assert_eq!(reduce(DType::Complex128, ReduceOp::Product, &inputs), number(2.5, 2.5));
    assert_eq!(reduce(DType::Complex128, ReduceOp::Avg, &inputs[..2]), number(2.0, 0.5));
    let number = |re: f32, im: f32| [re.to_ne_bytes(), im.to_ne_bytes()].concat();
    let inputs = [number(1.0, 2.0), number(3.0, -1.0)];
    assert_eq!(reduce(DType::Complex64, ReduceOp::Product, &inputs), number(5.0, 5.0));
    assert!(Reduction::new(DType::Complex64, ReduceOp::Max).is_err());
}

#[test]
fn booleans_follow_logic() {
    let inputs = [vec![0, 0, 7, 1], vec![0, 1, 0, 255]];
    for (op, expected) in [
        (ReduceOp::Sum, [0, 1, 1, 1]),
        (ReduceOp::Max, [0, 1, 1, 1]),
        (ReduceOp::BitOr, [0, 1, 1, 1]),
        (ReduceOp::Product, [0, 0, 0, 1]),
        (ReduceOp::Min, [0, 0, 0, 1]),
        (ReduceOp::BitAnd, [0, 0, 0, 1]),
        (ReduceOp::BitXor, [0, 1, 1, 0]),
    ] {
        assert_eq!(reduce(DType::Bool, op, &inputs), expected, "{op:?}");
    }
    assert!(Reduction::new(DType::Bool, ReduceOp::Avg).is_err());
    assert!(Reduction::new(DType::F32, ReduceOp::BitXor).is_err());
}

/// Prints the speed of the kernels in GB/s of input: `cargo test --release -p mooncake-pg speed --
/// --ignored --nocapture`.
#[test]
#[ignore = "measures"]
fn speed() {
    const LEN: usize = 256 << 10;
    let clock = SystemClock::new();
    for ranks in [2, 8] {
        for dtype in [DType::F32, DType::F64, DType::Bf16, DType::F16, DType::I32, DType::F8E4M3Fn] {
            let inputs: Vec<Vec<u8>> = (0..ranks).map(|_| vec![0x3f; LEN]).collect();
            let slices: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
            let (mut out, reduction) = (vec![0; LEN], Reduction::new(dtype, ReduceOp::Sum).unwrap());
            let rounds = 400;
            let began = clock.now();
            for _ in 0..rounds {
                reduction.apply(black_box(&slices), black_box(&mut out));
            }
            let took = clock.now().since(began).as_secs_f64();
            let speed = (ranks * LEN * rounds) as f64 / took / 1e9;
            eprintln!("{ranks} inputs of {:14} {speed:6.1} GB/s", dtype.name());
        }
    }
}
