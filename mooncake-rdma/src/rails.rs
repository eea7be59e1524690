//! Which way a message goes: from one of our devices to one of the peer's.

use mooncake_core::clock::Moment;

/// One way, as far as choosing needs to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way {
    /// Our device.
    pub(crate) local: usize,
    /// The peer's.
    pub(crate) remote: usize,
    /// Our device works.
    pub(crate) up: bool,
    /// Our device is on the memory's side of the machine.
    pub(crate) near: bool,
    /// Both have the same name, as they do in clusters where such devices share a switch.
    pub(crate) twin: bool,
    /// Left alone until then, because it failed.
    pub(crate) paused: Moment,
}

/// The best way now: near before far, twins before others, and in turn among equals. The one to `avoid` comes last, and of ways that
/// are all paused the one that was first.
pub(crate) fn best(
    ways: impl Iterator<Item = Way>,
    now: Moment,
    turn: usize,
    avoid: Option<(usize, usize)>,
) -> Option<Way> {
    ways.filter(|way| way.up).min_by_key(|way| {
        let paused = if way.paused > now { way.paused } else { Moment(0) };
        let avoided = avoid == Some((way.local, way.remote));
        // Spread by a multiplication, as the number of ways is not known here.
        let place = (way.local * 31 + way.remote).wrapping_add(turn).wrapping_mul(0x9e37_79b9) & 0xffff;
        (paused, avoided, !way.near, !way.twin, place)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const NOW: Moment = Moment(100);

    fn way(local: usize, remote: usize) -> Way {
        Way { local, remote, up: true, near: true, twin: false, paused: Moment(0) }
    }

    fn chosen(ways: &[Way], turn: usize, avoid: Option<(usize, usize)>) -> Option<(usize, usize)> {
        best(ways.iter().copied(), NOW, turn, avoid).map(|way| (way.local, way.remote))
    }

    #[test]
    fn near_and_twin_first() {
        let far = |way| Way { near: false, ..way };
        let twin = |way| Way { twin: true, ..way };
        assert_eq!(chosen(&[far(twin(way(0, 0))), way(1, 0), twin(way(1, 1))], 0, None), Some((1, 1)));
        assert_eq!(chosen(&[far(twin(way(0, 0))), way(1, 0)], 0, None), Some((1, 0)));
        assert_eq!(chosen(&[far(way(0, 0))], 0, None), Some((0, 0)), "far is better than nothing");
        assert_eq!(chosen(&[], 0, None), None);
    }

    #[test]
    fn what_is_down_is_not_used_and_what_failed_only_last() {
        let down = |way| Way { up: false, ..way };
        let paused = |way, until| Way { paused: Moment(until), ..way };
        assert_eq!(chosen(&[down(way(0, 0))], 0, None), None);
        assert_eq!(chosen(&[paused(way(0, 0), 200), way(0, 1)], 0, None), Some((0, 1)));
        assert_eq!(chosen(&[paused(way(0, 0), 300), paused(way(0, 1), 200)], 0, None), Some((0, 1)));
        assert_eq!(
            chosen(&[paused(way(0, 0), 99), way(0, 1)], 0, Some((0, 1))),
            Some((0, 0)),
            "its time is over"
        );
        assert_eq!(chosen(&[way(0, 0)], 0, Some((0, 0))), Some((0, 0)), "there is no other");
    }

    #[test]
    fn equals_take_turns() {
        let ways: Vec<Way> = (0..4).map(|remote| way(0, remote)).collect();
        let used: HashSet<_> = (0..64).filter_map(|turn| chosen(&ways, turn, None)).collect();
        assert_eq!(used.len(), 4);
    }
}
