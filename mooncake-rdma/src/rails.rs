//! Choice of the rail of a message: a local device and a device of the peer.

use mooncake_core::clock::Moment;

/// Properties of a rail that the choice needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RailCandidate {
    /// Index of the local device.
    pub(crate) local: usize,
    /// Index of the peer's device.
    pub(crate) remote: usize,
    /// True if the local device is up.
    pub(crate) up: bool,
    /// True if the local device is near the memory.
    pub(crate) near: bool,
    /// True if the local device prefers this device of the peer: both have the same name, as in
    /// clusters where such devices share a switch, or the configuration pairs them.
    pub(crate) twin: bool,
    /// End of the pause after a failure.
    pub(crate) paused: Moment,
}

/// Returns the best rail now: near before far, preferred pairs before others, and in turn among
/// equals. The one to `avoid` comes last. If all rails are paused, the one that was paused first is
/// chosen.
pub(crate) fn best(
    ways: impl Iterator<Item = RailCandidate>,
    now: Moment,
    turn: usize,
    avoid: Option<(usize, usize)>,
) -> Option<RailCandidate> {
    ways.filter(|way| way.up).min_by_key(|way| {
        let paused = if way.paused > now { way.paused } else { Moment(0) };
        let avoided = avoid == Some((way.local, way.remote));
        // A multiplication spreads the turns, because the number of rails is unknown here.
        let place = (way.local * 31 + way.remote).wrapping_add(turn).wrapping_mul(0x9e37_79b9) & 0xffff;
        (paused, avoided, !way.near, !way.twin, place)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_core::clock::Rng;
    use proptest::prelude::*;
    use std::collections::HashSet;

    const NOW: Moment = Moment(100);

    fn way(local: usize, remote: usize) -> RailCandidate {
        RailCandidate { local, remote, up: true, near: true, twin: false, paused: Moment(0) }
    }

    fn chosen(ways: &[RailCandidate], turn: usize, avoid: Option<(usize, usize)>) -> Option<(usize, usize)> {
        best(ways.iter().copied(), NOW, turn, avoid).map(|way| (way.local, way.remote))
    }

    #[test]
    fn near_and_twin_first() {
        let far = |way| RailCandidate { near: false, ..way };
        let twin = |way| RailCandidate { twin: true, ..way };
        assert_eq!(chosen(&[far(twin(way(0, 0))), way(1, 0), twin(way(1, 1))], 0, None), Some((1, 1)));
        assert_eq!(chosen(&[far(twin(way(0, 0))), way(1, 0)], 0, None), Some((1, 0)));
        assert_eq!(chosen(&[far(way(0, 0))], 0, None), Some((0, 0)), "a far device is better than none");
        assert_eq!(chosen(&[], 0, None), None);
    }

    #[test]
    fn devices_that_are_down_are_unused_and_failed_ones_come_last() {
        let down = |way| RailCandidate { up: false, ..way };
        let paused = |way, until| RailCandidate { paused: Moment(until), ..way };
        assert_eq!(chosen(&[down(way(0, 0))], 0, None), None);
        assert_eq!(chosen(&[paused(way(0, 0), 200), way(0, 1)], 0, None), Some((0, 1)));
        assert_eq!(chosen(&[paused(way(0, 0), 300), paused(way(0, 1), 200)], 0, None), Some((0, 1)));
        assert_eq!(
            chosen(&[paused(way(0, 0), 99), way(0, 1)], 0, Some((0, 1))),
            Some((0, 0)),
            "its pause is over"
        );
        assert_eq!(chosen(&[way(0, 0)], 0, Some((0, 0))), Some((0, 0)), "there is no other rail");
    }

    #[test]
    fn equals_take_turns() {
        let ways: Vec<RailCandidate> = (0..4).map(|remote| way(0, remote)).collect();
        let used: HashSet<_> = (0..64).filter_map(|turn| chosen(&ways, turn, None)).collect();
        assert_eq!(used.len(), 4);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..Default::default() })]

        /// Rails fail, and devices go down and come back, at random. A message is retried as a node
        /// does it: a failed rail is paused and avoided next. A working rail is found as soon as
        /// the others have failed once, and no far rail is used while a near one works.
        #[test]
        fn a_working_rail_is_found(seed: u64, locals in 1usize..4, remotes in 1usize..4) {
            let mut rng = Rng::seeded(seed);
            let mut some = |of: u64| rng.below(of) as usize;
            let mut ways: Vec<RailCandidate> = (0..locals)
                .flat_map(|local| (0..remotes).map(move |remote| way(local, remote)))
                .collect();
            let near: Vec<bool> = (0..locals).map(|_| some(2) == 0).collect();
            let mut works = vec![true; ways.len()];
            for now in (0..2000).step_by(10) {
                match some(3) {
                    0 => { let local = some(locals as u64); let up = some(3) != 0; ways.iter_mut().filter(|w| w.local == local).for_each(|w| w.up = up); }
                    1 => { let i = some(ways.len() as u64); works[i] = some(2) == 0; }
                    _ => {}
                }
                ways.iter_mut().for_each(|w| { w.near = near[w.local]; w.twin = w.local == w.remote; });
                let index = |w: &RailCandidate| w.local * remotes + w.remote;
                let usable = |ways: &[RailCandidate]| ways.iter().any(|w| w.up && works[index(w)]);
                let (mut avoid, mut tried) = (None, HashSet::new());
                for turn in 0.. {
                    let chosen = best(ways.iter().copied(), Moment(now), some(1 << 16), avoid);
                    let Some(chosen) = chosen else {
                        prop_assert!(ways.iter().all(|w| !w.up), "no rail is chosen only when all are down");
                        break;
                    };
                    prop_assert!(chosen.up);
                    let is_paused = |w: &RailCandidate| w.paused > Moment(now);
                    let better = |w: &&RailCandidate| w.up && !is_paused(w) && avoid != Some((w.local, w.remote));
                    if is_paused(&chosen) {
                        prop_assert!(!ways.iter().any(|w| w.up && !is_paused(w)), "a failed rail was chosen beside a good one");
                    } else if !chosen.near && avoid != Some((chosen.local, chosen.remote)) {
                        prop_assert!(!ways.iter().filter(better).any(|w| w.near), "a far rail was chosen beside a near one");
                    }
                    if works[index(&chosen)] {
                        break;
                    }
                    ways[index(&chosen)].paused = Moment(now + 300 + turn);
                    avoid = Some((chosen.local, chosen.remote));
                    tried.insert(avoid);
                    // Rails paused earlier are tried last, in the order of their pauses.
                    if turn as usize >= 2 * ways.len() {
                        prop_assert!(!usable(&ways), "{} rails were tried, and one works", tried.len());
                        break;
                    }
                }
            }
        }
    }
}
