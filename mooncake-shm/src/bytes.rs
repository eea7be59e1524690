//! Copies of bytes.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "the slow instruction is one of x86-64"))]

/// Page of the smallest size.
const PAGE: usize = 4096;
/// Lengths that the C library copies with `rep movsb` on AMD: up to the second-level cache of a
/// core (glibc 2.36; 512 KiB on EPYC of the third generation). For more bytes, the C library is
/// faster than a loop of vectors.
const MOVSB: std::ops::Range<usize> = 4096..512 << 10;
/// Distance of the target behind the source, within a page, below which `rep movsb` has a third of
/// its rate on AMD EPYC. On Intel Xeon, `rep movsb` is faster than a loop of vectors at every
/// distance. Large arrays of numpy begin 16 bytes behind a page.
const SLOW: usize = 32;

/// Copies bytes, as [`std::ptr::copy`] does.
///
/// # Safety
/// Both ranges are valid for `len` bytes, one for reads and one for writes, until this returns. The
/// ranges may overlap, and may be the same pages at other addresses.
pub(crate) unsafe fn copy(target: *mut u8, source: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if is_slow(target, source, len) && *IS_AMD {
        // SAFETY: promised by the caller; slow ranges do not overlap in this way.
        return unsafe { copy_with_vectors(target, source, len) };
    }
    // SAFETY: promised by the caller.
    unsafe { target.copy_from(source, len) }
}

/// Returns whether `rep movsb` is slow on AMD for these ranges, and a loop of vectors can copy
/// them: the target does not begin within the source.
fn is_slow(target: *mut u8, source: *const u8, len: usize) -> bool {
    let distance = target.addr().wrapping_sub(source.addr());
    MOVSB.contains(&len) && (1..SLOW).contains(&(distance % PAGE)) && distance >= len
}

/// True on processors of AMD.
#[cfg(target_arch = "x86_64")]
static IS_AMD: std::sync::LazyLock<bool> = std::sync::LazyLock::new(|| {
    #[allow(unused_unsafe, reason = "safe in later versions of Rust")]
    // SAFETY: every processor of this architecture has the instruction and its first leaf.
    let vendor = unsafe { std::arch::x86_64::__cpuid(0) };
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == *b"AuthenticAMD"
});

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

    /// Copies as on every processor and, where vectors may be used, as on AMD. Returns what each
    /// way makes of the memory.
    fn copied(memory: &[u8], to: usize, from: usize, len: usize) -> Vec<Vec<u8>> {
        let mut ways: Vec<unsafe fn(*mut u8, *const u8, usize)> = vec![copy];
        #[cfg(target_arch = "x86_64")]
        if is_slow(memory[to..].as_ptr().cast_mut(), memory[from..].as_ptr(), len) {
            ways.push(copy_with_vectors);
        }
        let copied = ways.into_iter().map(|way| {
            let mut memory = memory.to_vec();
            let base = memory.as_mut_ptr();
            // SAFETY: both ranges lie in the vector.
            unsafe { way(base.add(to), base.add(from), len) };
            memory
        });
        copied.collect()
    }

    #[test]
    fn every_distance_and_length_is_copied() {
        let memory: Vec<u8> = (0..8 * PAGE).map(|at| (at % 251) as u8).collect();
        let mut with_vectors = 0;
        for distance in [0, 1, 8, 16, 31, 32, 64, PAGE - 16] {
            let least = MOVSB.start;
            for len in [0, 1, 63, least - 1, least, least + 1, least + 63, 2 * PAGE] {
                let (to, mut wanted) = (4 * PAGE + distance, memory.clone());
                wanted.copy_within(0..len, to);
                let ways = copied(&memory, to, 0, len);
                with_vectors += ways.len() - 1;
                assert!(ways.iter().all(|copied| *copied == wanted), "{distance} {len}");
            }
        }
        // Four distances, and four lengths from 4 KiB on.
        assert_eq!(with_vectors, if cfg!(target_arch = "x86_64") { 16 } else { 0 });
    }

    #[test]
    fn overlapping_ranges_are_copied() {
        let memory: Vec<u8> = (0..3 * PAGE).map(|at| (at % 251) as u8).collect();
        // The target begins within the source, or ends within it, 16 bytes behind it in a page.
        for (to, from, ways) in [(16, 0, 1), (0, PAGE - 16, 2)] {
            let mut wanted = memory.clone();
            wanted.copy_within(from..from + 2 * PAGE, to);
            let copied = copied(&memory, to, from, 2 * PAGE);
            assert!(copied.iter().all(|copied| *copied == wanted), "{to} {from}");
            assert_eq!(copied.len(), if cfg!(target_arch = "x86_64") { ways } else { 1 });
        }
    }
}
