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
    /// Ours prefers this one of the peer's: both have the same name, as in clusters where such devices share a switch, or somebody said so.
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
    use mooncake_core::clock::Rng;
    use proptest::prelude::*;
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

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..Default::default() })]

        /// Ways fail and devices go down and come back at random. A message is tried as a node does it: whoever fails is left alone for a
        /// while and avoided next. What works is found as soon as the rest has failed once, and nobody goes far while near works.
        #[test]
        fn what_works_is_found(seed: u64, locals in 1usize..4, remotes in 1usize..4) {
            let mut rng = Rng::seeded(seed);
            let mut some = |of: u64| rng.below(of) as usize;
            let mut ways: Vec<Way> = (0..locals)
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
                let index = |w: &Way| w.local * remotes + w.remote;
                let usable = |ways: &[Way]| ways.iter().any(|w| w.up && works[index(w)]);
                let (mut avoid, mut tried) = (None, HashSet::new());
                for turn in 0.. {
                    let chosen = best(ways.iter().copied(), Moment(now), some(1 << 16), avoid);
                    let Some(chosen) = chosen else {
                        prop_assert!(ways.iter().all(|w| !w.up), "nothing is chosen only when all is down");
                        break;
                    };
                    prop_assert!(chosen.up);
                    let is_paused = |w: &Way| w.paused > Moment(now);
                    let better = |w: &&Way| w.up && !is_paused(w) && avoid != Some((w.local, w.remote));
                    if is_paused(&chosen) {
                        prop_assert!(!ways.iter().any(|w| w.up && !is_paused(w)), "one that failed, beside one that did not");
                    } else if !chosen.near && avoid != Some((chosen.local, chosen.remote)) {
                        prop_assert!(!ways.iter().filter(better).any(|w| w.near), "far, beside near");
                    }
                    if works[index(&chosen)] {
                        break;
                    }
                    ways[index(&chosen)].paused = Moment(now + 300 + turn);
                    avoid = Some((chosen.local, chosen.remote));
                    tried.insert(avoid);
                    // Those left alone since before are tried last, the one first left alone first.
                    if turn as usize >= 2 * ways.len() {
                        prop_assert!(!usable(&ways), "{} ways were tried, and one works", tried.len());
                        break;
                    }
                }
            }
        }
    }
}
