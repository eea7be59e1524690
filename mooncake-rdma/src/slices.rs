//! Splitting of a transfer into messages.

/// Lengths that transfers are split into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SliceLengths {
    /// Bytes per message.
    pub(crate) slice: usize,
    /// Maximum length of a last message that is merged with the one before.
    pub(crate) fragment: usize,
    /// Longest message of the device.
    pub(crate) longest: usize,
}

impl SliceLengths {
    /// Returns offset and length of each message of a transfer of `len` bytes. `room` returns the
    /// distance from an offset to the end of its registered part, on either side. No message
    /// crosses that end.
    pub(crate) fn pieces(
        self,
        len: usize,
        room: impl Fn(usize) -> usize,
    ) -> impl Iterator<Item = (usize, usize)> {
        let slice = self.slice.min(self.longest).max(1);
        let mut at = 0;
        std::iter::from_fn(move || {
            let left = if at == len { 0 } else { room(at).max(1).min(len - at) };
            let last = left <= slice.saturating_add(self.fragment) && left <= self.longest.max(1);
            let take = if last { left } else { slice.min(left) };
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
        let cut = SliceLengths { slice: 100, fragment: 25, longest: 1000 };
        let of = |len| cut.pieces(len, |_| usize::MAX).collect::<Vec<_>>();
        assert_eq!(of(0), []);
        assert_eq!(of(125), [(0, 125)]);
        assert_eq!(of(126), [(0, 100), (100, 26)]);
        assert_eq!(of(225), [(0, 100), (100, 125)]);
        let cut = SliceLengths { slice: 100, fragment: 25, longest: 110 };
        assert_eq!(
            cut.pieces(120, |_| usize::MAX).collect::<Vec<_>>(),
            [(0, 100), (100, 20)],
            "the limit of the device comes first"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..Default::default() })]

        #[test]
        fn pieces_cover_everything_once(
            len in 0usize..5000, slice in 1usize..700, fragment in 0usize..300, longest in 1usize..900,
            (ours, theirs) in ((0usize..500, 1usize..900), (0usize..500, 1usize..900)),
        ) {
            let cut = SliceLengths { slice, fragment, longest };
            // Memory on each side lies in parts of `each` bytes, and the transfer begins anywhere
            // in one.
            let part = |(from, each): (usize, usize), at: usize| (from + at) / each;
            let room = |(from, each): (usize, usize), at: usize| each - (from + at) % each;
            let mut at = 0;
            for (offset, piece) in cut.pieces(len, |at| room(ours, at).min(room(theirs, at))) {
                prop_assert_eq!(offset, at);
                prop_assert!(piece > 0 && piece <= longest);
                for side in [ours, theirs] {
                    prop_assert_eq!(part(side, at), part(side, at + piece - 1), "a message crosses the end of a part");
                }
                at += piece;
            }
            prop_assert_eq!(at, len);
        }
    }
}
