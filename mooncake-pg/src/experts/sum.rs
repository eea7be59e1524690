//! Weighted sums of rows.

use std::num::NonZero;
use std::thread;

use mooncake_core::{Error, Result};

use super::Rows;
use super::layout::threads_for;
use crate::reduce::to_bf16;

/// Elements that are added up at a time. Their sums stay in registers and the first-level cache.
const BLOCK: usize = 512;
const ELEMENT: usize = 2;

/// Adds up rows of `bf16` for each token, with a row and a weight for each of its choices. A
/// negative row stands for none. The sums are in `f32`, in the order of the choices, and rounded
/// once. At most that many threads work.
///
/// # Errors
/// `INVALID_PARAMS` if a length does not fit, or a row is not there.
pub fn add_up(
    memory: Rows<'_>,
    rows: &[i64],
    weights: &[f32],
    out: &mut [u8],
    threads: NonZero<usize>,
) -> Result<()> {
    let width = memory.width();
    let tokens = out.len() / width;
    if tokens == 0 {
        return Ok(());
    }
    let choices = rows.len() / tokens;
    let is_whole = out.len() == width * tokens && rows.len() == choices * tokens;
    let is_there = |row: &i64| *row < 0 || usize::try_from(*row).is_ok_and(|row| row < memory.count());
    if !is_whole
        || rows.len() != weights.len()
        || !width.is_multiple_of(ELEMENT)
        || !rows.iter().all(is_there)
    {
        return Err(Error::invalid("cannot combine: the lengths of the arguments do not fit"));
    }
    if choices == 0 {
        out.fill(0);
        return Ok(());
    }
    let threads = threads_for(threads, rows.len() * width);
    let share = tokens.div_ceil(threads);
    let work = |out: &mut [u8], rows: &[i64], weights: &[f32]| {
        let tokens = rows.chunks(choices).zip(weights.chunks(choices));
        for (out, (rows, weights)) in out.chunks_mut(width).zip(tokens) {
            add_up_token(memory, rows, weights, out);
        }
    };
    if threads == 1 {
        work(out, rows, weights);
        return Ok(());
    }
    thread::scope(|scope| {
        let parts = out.chunks_mut(share * width).zip(rows.chunks(share * choices));
        for ((out, rows), weights) in parts.zip(weights.chunks(share * choices)) {
            scope.spawn(move || work(out, rows, weights));
        }
    });
    Ok(())
}

fn add_up_token(memory: Rows<'_>, rows: &[i64], weights: &[f32], out: &mut [u8]) {
    let (out, _) = out.as_chunks_mut::<ELEMENT>();
    for (block, out) in out.chunks_mut(BLOCK).enumerate() {
        let mut sums = [0f32; BLOCK];
        let sums = &mut sums[..out.len()];
        for (row, weight) in rows.iter().zip(weights).filter(|(row, _)| **row >= 0) {
            let (elements, _) = memory.row(*row as usize).as_chunks::<ELEMENT>();
            let elements = &elements[block * BLOCK..][..sums.len()];
            for (sum, element) in sums.iter_mut().zip(elements) {
                *sum += weight * f32::from_bits(u32::from(u16::from_ne_bytes(*element)) << 16);
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = to_bf16(*sum);
        }
    }
}
