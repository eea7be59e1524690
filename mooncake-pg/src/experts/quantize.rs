//! Rows of `float8` with the scales of their blocks.

use std::num::NonZero;
use std::thread;

use mooncake_core::{Error, Result};

use super::layout::threads_for;
use super::{BLOCK, Sizes};
use crate::reduce::to_e4m3fn;

const ELEMENT: usize = 2;
const SCALE: usize = size_of::<f32>();
/// Least magnitude to which a block is scaled, and the greatest `e4m3fn`.
const LEAST: f32 = 1e-4;
const GREATEST: f32 = 448.0;

/// Writes each token of `bf16` as a row: elements of `e4m3fn`, then the scale of each block of 128
/// elements. An element times its scale is the value. At most that many threads work.
///
/// # Errors
/// `INVALID_PARAMS` if a length does not fit, or the rows do not have scales.
pub fn quantize(sizes: &Sizes, tokens: &[u8], rows: &mut [u8], threads: NonZero<usize>) -> Result<()> {
    let (from, to) = (sizes.hidden * ELEMENT, sizes.width());
    let number = tokens.len() / from;
    if !sizes.is_fp8 || tokens.len() != number * from || rows.len() != number * to {
        return Err(Error::invalid("cannot dispatch: the lengths of the tokens do not fit"));
    }
    if number == 0 {
        return Ok(());
    }
    let threads = threads_for(threads, tokens.len());
    let share = number.div_ceil(threads);
    let work = |tokens: &[u8], rows: &mut [u8]| {
        for (token, row) in tokens.chunks_exact(from).zip(rows.chunks_exact_mut(to)) {
            quantize_token(token, row.split_at_mut(sizes.hidden));
        }
    };
    if threads == 1 {
        work(tokens, rows);
        return Ok(());
    }
    thread::scope(|scope| {
        for (tokens, rows) in tokens.chunks(share * from).zip(rows.chunks_mut(share * to)) {
            scope.spawn(move || work(tokens, rows));
        }
    });
    Ok(())
}

fn quantize_token(token: &[u8], (elements, scales): (&mut [u8], &mut [u8])) {
    let (blocks, _) = token.as_chunks::<{ BLOCK * ELEMENT }>();
    let (elements, _) = elements.as_chunks_mut::<BLOCK>();
    let (scales, _) = scales.as_chunks_mut::<SCALE>();
    for ((block, elements), scale) in blocks.iter().zip(elements).zip(scales) {
        let (values, _) = block.as_chunks::<ELEMENT>();
        // The bits of magnitudes are in the order of the magnitudes. Those of NaN are the greatest.
        let most = values.iter().fold(0, |most: i16, value| most.max(i16::from_ne_bytes(*value) & i16::MAX));
        let most = f32::from_bits(u32::from(most.cast_unsigned()) << 16);
        let most = if most < LEAST { LEAST } else { most };
        // As torch divides a number by a tensor.
        let factor = most.recip() * GREATEST;
        for (element, value) in elements.iter_mut().zip(values) {
            // No product exceeds the greatest element after rounding.
            *element = to_e4m3fn(f32::from_bits(u32::from(u16::from_ne_bytes(*value)) << 16) * factor);
        }
        *scale = (most / GREATEST).to_ne_bytes();
    }
}
