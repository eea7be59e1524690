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
    /// True if the local device is on the NUMA node of the memory.
    pub(crate) numa_local: bool,
    /// True if the local device prefers this device of the peer: both have the same name, as in
    /// clusters where such devices share a switch, or the configuration pairs them.
    pub(crate) preferred: bool,
    /// End of the pause after a failure.
    pub(crate) paused_until: Moment,
}

/// Returns the best rail now: devices on the NUMA node of the memory before others, preferred pairs
/// before others, and in turn among equals. The one to `avoid` comes last. If all rails are paused,
/// the one that was paused first is chosen.
pub(crate) fn best(
    candidates: impl Iterator<Item = RailCandidate>,
    now: Moment,
    round_robin: usize,
    avoid: Option<(usize, usize)>,
) -> Option<RailCandidate> {
    candidates.filter(|candidate| candidate.up).min_by_key(|candidate| {
        let paused_until = if candidate.paused_until > now { candidate.paused_until } else { Moment(0) };
        let avoided = avoid == Some((candidate.local, candidate.remote));
        // A multiplication spreads the turns, because the number of rails is unknown here.
        let tie_break =
            (candidate.local * 31 + candidate.remote).wrapping_add(round_robin).wrapping_mul(0x9e37_79b9)
                & 0xffff;
        (paused_until, avoided, !candidate.numa_local, !candidate.preferred, tie_break)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_core::clock::Rng;
    use proptest::prelude::*;
    use std::collections::HashSet;

    const NOW: Moment = Moment(100);

    fn candidate(local: usize, remote: usize) -> RailCandidate {
        RailCandidate { local, remote, up: true, numa_local: true, preferred: false, paused_until: Moment(0) }
    }

    fn chosen(
        candidates: &[RailCandidate],
        round_robin: usize,
        avoid: Option<(usize, usize)>,
    ) -> Option<(usize, usize)> {
        best(candidates.iter().copied(), NOW, round_robin, avoid)
            .map(|candidate| (candidate.local, candidate.remote))
    }

    #[test]
    fn numa_local_and_preferred_come_first() {
        let numa_remote = |candidate| RailCandidate { numa_local: false, ..candidate };
        let preferred = |candidate| RailCandidate { preferred: true, ..candidate };
        assert_eq!(
            chosen(
                &[numa_remote(preferred(candidate(0, 0))), candidate(1, 0), preferred(candidate(1, 1))],
                0,
                None
            ),
            Some((1, 1))
        );
        assert_eq!(
            chosen(&[numa_remote(preferred(candidate(0, 0))), candidate(1, 0)], 0, None),
            Some((1, 0))
        );
        assert_eq!(
            chosen(&[numa_remote(candidate(0, 0))], 0, None),
            Some((0, 0)),
            "a device of another NUMA node is better than none"
        );
        assert_eq!(chosen(&[], 0, None), None);
    }

    #[test]
    fn devices_that_are_down_are_unused_and_failed_ones_come_last() {
        let down = |candidate| RailCandidate { up: false, ..candidate };
        let paused_until = |candidate, until| RailCandidate { paused_until: Moment(until), ..candidate };
        assert_eq!(chosen(&[down(candidate(0, 0))], 0, None), None);
        assert_eq!(chosen(&[paused_until(candidate(0, 0), 200), candidate(0, 1)], 0, None), Some((0, 1)));
        assert_eq!(
            chosen(&[paused_until(candidate(0, 0), 300), paused_until(candidate(0, 1), 200)], 0, None),
            Some((0, 1))
        );
        assert_eq!(
            chosen(&[paused_until(candidate(0, 0), 99), candidate(0, 1)], 0, Some((0, 1))),
            Some((0, 0)),
            "its pause is over"
        );
        assert_eq!(chosen(&[candidate(0, 0)], 0, Some((0, 0))), Some((0, 0)), "there is no other rail");
    }

    #[test]
    fn equals_take_turns() {
        let candidates: Vec<RailCandidate> = (0..4).map(|remote| candidate(0, remote)).collect();
        let used: HashSet<_> = (0..64).filter_map(|turn| chosen(&candidates, turn, None)).collect();
        assert_eq!(used.len(), 4);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..Default::default() })]

        /// Rails fail, and devices go down and come back, at random. A message is retried as a node
        /// does it: a failed rail is paused and avoided next. A working rail is found as soon as
        /// the others have failed once, and no rail of another NUMA node is used while one of this
        /// node works.
        #[test]
        fn a_working_rail_is_found(seed: u64, locals in 1usize..4, remotes in 1usize..4) {
            let mut rng = Rng::seeded(seed);
            let mut random = |of: u64| rng.below(of) as usize;
            let mut candidates: Vec<RailCandidate> = (0..locals)
                .flat_map(|local| (0..remotes).map(move |remote| candidate(local, remote)))
                .collect();
            let numa_local: Vec<bool> = (0..locals).map(|_| random(2) == 0).collect();
            let mut is_working = vec![true; candidates.len()];
            for now in (0..2000).step_by(10) {
                match random(3) {
                    0 => { let local = random(locals as u64); let up = random(3) != 0; candidates.iter_mut().filter(|w| w.local == local).for_each(|w| w.up = up); }
                    1 => { let i = random(candidates.len() as u64); is_working[i] = random(2) == 0; }
                    _ => {}
                }
                candidates.iter_mut().for_each(|w| { w.numa_local = numa_local[w.local]; w.preferred = w.local == w.remote; });
                let index = |w: &RailCandidate| w.local * remotes + w.remote;
                let usable = |candidates: &[RailCandidate]| candidates.iter().any(|w| w.up && is_working[index(w)]);
                let (mut avoid, mut attempts) = (None, HashSet::new());
                for attempt in 0.. {
                    let chosen = best(candidates.iter().copied(), Moment(now), random(1 << 16), avoid);
                    let Some(chosen) = chosen else {
                        prop_assert!(candidates.iter().all(|w| !w.up), "no rail is chosen only when all are down");
                        break;
                    };
                    prop_assert!(chosen.up);
                    let is_paused = |w: &RailCandidate| w.paused_until > Moment(now);
                    let is_usable = |w: &&RailCandidate| w.up && !is_paused(w) && avoid != Some((w.local, w.remote));
                    if is_paused(&chosen) {
                        prop_assert!(!candidates.iter().any(|w| w.up && !is_paused(w)), "a failed rail was chosen beside a good one");
                    } else if !chosen.numa_local && avoid != Some((chosen.local, chosen.remote)) {
                        prop_assert!(!candidates.iter().filter(is_usable).any(|w| w.numa_local), "a rail of another NUMA node was chosen beside one of this node");
                    }
                    if is_working[index(&chosen)] {
                        break;
                    }
                    candidates[index(&chosen)].paused_until = Moment(now + 300 + attempt);
                    avoid = Some((chosen.local, chosen.remote));
                    attempts.insert(avoid);
                    // Rails paused earlier are tried last, in the order of their pauses.
                    if attempt as usize >= 2 * candidates.len() {
                        prop_assert!(!usable(&candidates), "{} rails were tried, and one works", attempts.len());
                        break;
                    }
                }
            }
        }
    }
}
