//! Cutting a transfer into messages.

/// Sizes messages are cut to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Bytes per message.
    pub(crate) slice: usize,
    /// A rest no longer than this goes with the message before it.
    pub(crate) fragment: usize,
    /// Longest message the device sends.
    pub(crate) longest: usize,
}

impl Cut {
    /// Offset and length of each message of a transfer of `len` bytes.
    pub(crate) fn pieces(self, len: usize) -> impl Iterator<Item = (usize, usize)> {
        let slice = self.slice.min(self.longest).max(1);
        let mut at = 0;
        std::iter::from_fn(move || {
            let left = len - at;
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
        let cut = Cut { slice: 100, fragment: 25, longest: 1000 };
        let of = |len| cut.pieces(len).collect::<Vec<_>>();
        assert_eq!(of(0), []);
        assert_eq!(of(125), [(0, 125)]);
        assert_eq!(of(126), [(0, 100), (100, 26)]);
        assert_eq!(of(225), [(0, 100), (100, 125)]);
        let cut = Cut { slice: 100, fragment: 25, longest: 110 };
        assert_eq!(
            cut.pieces(120).collect::<Vec<_>>(),
            [(0, 100), (100, 20)],
            "the device's limit comes first"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..Default::default() })]

        #[test]
        fn pieces_cover_everything_once(len in 0usize..5000, slice in 1usize..700, fragment in 0usize..300, longest in 1usize..900) {
            let cut = Cut { slice, fragment, longest };
            let mut at = 0;
            for (offset, piece) in cut.pieces(len) {
                prop_assert_eq!(offset, at);
                prop_assert!(piece > 0 && piece <= longest);
                at += piece;
            }
            prop_assert_eq!(at, len);
        }
    }
}
