//! Copies of bytes.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "the slow instruction is one of x86-64"))]

/// Page of the smallest size.
const PAGE: usize = 4096;
/// Lengths that the C library copies with `rep movsb`: up to the second-level cache of a core on
/// AMD (glibc 2.36; 512 KiB on EPYC of the third generation). For more bytes, the C library is
/// faster than a loop of vectors.
const MOVSB: std::ops::Range<usize> = 4096..512 << 10;
/// Distance of the target behind the source, within a page, below which `rep movsb` has a third of
/// its rate (seen on AMD EPYC). Large arrays of numpy begin 16 bytes behind a page.
const SLOW: usize = 32;

/// Copies bytes, as [`std::ptr::copy`] does.
///
/// # Safety
/// Both ranges are valid for `len` bytes, one for reads and one for writes, until this returns. The
/// ranges may overlap, and may be the same pages at other addresses.
pub(crate) unsafe fn copy(target: *mut u8, source: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        let distance = (target.addr()).wrapping_sub(source.addr());
        if MOVSB.contains(&len) && (1..SLOW).contains(&(distance % PAGE)) && distance >= len {
            // SAFETY: promised by the caller.
            return unsafe { copy_with_vectors(target, source, len) };
        }
    }
    // SAFETY: promised by the caller.
    unsafe { target.copy_from(source, len) }
}

/// Copies with loads and stores of 16 bytes, which every such processor has.
///
/// # Safety
/// As for [`copy`], and the target does not begin within the source. (It may end there: a round
/// reads its bytes before it writes, and later rounds read only bytes behind those.)
#[cfg(target_arch = "x86_64")]
unsafe fn copy_with_vectors(target: *mut u8, source: *const u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_storeu_si128};

    /// Bytes of a round.
    const ROUND: usize = 64;
    let end = len - len % ROUND;
    for at in (0..end).step_by(ROUND) {
        // SAFETY: a round lies in both ranges; neither needs an alignment.
        unsafe {
            let from = source.add(at).cast::<__m128i>();
            let to = target.add(at).cast::<__m128i>();
            let words = [0, 1, 2, 3].map(|word| _mm_loadu_si128(from.add(word)));
            for (word, value) in words.into_iter().enumerate() {
                _mm_storeu_si128(to.add(word), value);
            }
        }
    }
    // SAFETY: the rest of both ranges.
    unsafe { target.add(end).copy_from(source.add(end), len - end) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_distance_and_length_is_copied() {
        let source: Vec<u8> = (0..3 * PAGE).map(|at| (at % 251) as u8).collect();
        for distance in [0, 1, 8, 16, 31, 32, 64, PAGE - 16] {
            let least = MOVSB.start;
            for len in [0, 1, 63, least - 1, least, least + 1, least + 63, 2 * PAGE] {
                let mut memory = vec![0xee_u8; 4 * PAGE];
                // Within a page, the target is this far behind the source.
                let skip = source.as_ptr().addr().wrapping_sub(memory.as_ptr().addr()) % PAGE;
                let from = (skip + distance) % PAGE;
                // SAFETY: both ranges lie in their vectors.
                unsafe { copy(memory[from..].as_mut_ptr(), source.as_ptr(), len) };
                assert_eq!(memory[from..from + len], source[..len], "{distance} {len}");
                let mut others = memory[..from].iter().chain(&memory[from + len..]);
                assert!(others.all(|byte| *byte == 0xee), "{distance} {len}");
            }
        }
    }

    #[test]
    fn overlapping_ranges_are_copied() {
        let mut memory: Vec<u8> = (0..3 * PAGE).map(|at| (at % 251) as u8).collect();
        let wanted = memory[..2 * PAGE].to_vec();
        let base = memory.as_mut_ptr();
        // SAFETY: both ranges lie in the vector.
        unsafe { copy(base.add(16), base, 2 * PAGE) };
        assert_eq!(memory[16..16 + 2 * PAGE], wanted[..]);
        // The target ends within the source, 16 bytes behind it in a page.
        let from = PAGE - 16;
        let wanted = memory[from..from + 2 * PAGE].to_vec();
        let base = memory.as_mut_ptr();
        // SAFETY: as above.
        unsafe { copy(base, base.add(from), 2 * PAGE) };
        assert_eq!(memory[..2 * PAGE], wanted[..]);
    }
}
