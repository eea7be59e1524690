//! Splitting of a transfer into messages.

/// Lengths that transfers are split into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SliceLengths {
    /// Bytes per message.
    pub(crate) slice: usize,
    /// Maximum length of a last message that is merged with the one before.
    pub(crate) fragment: usize,
    /// Longest message of the device.
    pub(crate) max_message_bytes: usize,
}

impl SliceLengths {
    /// Returns offset and length of each message of a transfer of `len` bytes. `bytes_to_part_end`
    /// returns the distance from an offset to the end of its registered part, on either side. No
    /// message crosses that end.
    pub(crate) fn pieces(
        self,
        len: usize,
        bytes_to_part_end: impl Fn(usize) -> usize,
    ) -> impl Iterator<Item = (usize, usize)> {
        let slice = self.slice.min(self.max_message_bytes).max(1);
        let mut at = 0;
        std::iter::from_fn(move || {
            let remaining = if at == len { 0 } else { bytes_to_part_end(at).max(1).min(len - at) };
            let last = remaining <= slice.saturating_add(self.fragment)
                && remaining <= self.max_message_bytes.max(1);
            let take = if last { remaining } else { slice.min(remaining) };
            let piece = (at, take);
            at += take;
            (take != 0).then_some(piece)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_short_rest_goes_with_the_one_before() {
        let lengths = SliceLengths { slice: 100, fragment: 25, max_message_bytes: 1000 };
        let of = |len| lengths.pieces(len, |_| usize::MAX).collect::<Vec<_>>();
        assert_eq!(of(0), []);
        assert_eq!(of(125), [(0, 125)]);
        assert_eq!(of(126), [(0, 100), (100, 26)]);
        assert_eq!(of(225), [(0, 100), (100, 125)]);
        let lengths = SliceLengths { slice: 100, fragment: 25, max_message_bytes: 110 };
        assert_eq!(
            lengths.pieces(120, |_| usize::MAX).collect::<Vec<_>>(),
            [(0, 100), (100, 20)],
            "the limit of the device comes first"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..Default::default() })]

        #[test]
        fn pieces_cover_everything_once(
            len in 0usize..5000, slice in 1usize..700, fragment in 0usize..300, max_message_bytes in 1usize..900,
            (local, remote) in ((0usize..500, 1usize..900), (0usize..500, 1usize..900)),
        ) {
            let lengths = SliceLengths { slice, fragment, max_message_bytes };
            // Memory on each side lies in parts of `part_bytes` bytes, and the transfer begins
            // anywhere in one.
            let part = |(from, part_bytes): (usize, usize), at: usize| (from + at) / part_bytes;
            let bytes_to_part_end = |(from, part_bytes): (usize, usize), at: usize| part_bytes - (from + at) % part_bytes;
            let mut at = 0;
            for (offset, piece) in lengths.pieces(len, |at| bytes_to_part_end(local, at).min(bytes_to_part_end(remote, at))) {
                prop_assert_eq!(offset, at);
                prop_assert!(piece > 0 && piece <= max_message_bytes);
                for side in [local, remote] {
                    prop_assert_eq!(part(side, at), part(side, at + piece - 1), "a message crosses the end of a part");
                }
                at += piece;
            }
            prop_assert_eq!(at, len);
        }
    }
}
