//! Accounting of the buffer of a shared client, compared with a model: the counted bytes are those
//! in use, buffers do not overlap, and all of them are freed.

use std::collections::HashMap;

use mooncake_store::local::{LocalBuf, LocalStats};
use proptest::prelude::*;

use super::Host;

#[derive(Clone, Debug)]
enum Step {
    Alloc(usize),
    Put(usize),
    Get(u8),
    GetMany(Vec<u8>),
    Truncate(usize, usize),
    Drop(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let len = prop_oneof![1usize..200, 4000usize..5000, 100_000usize..300_000];
    prop_oneof![
        len.clone().prop_map(Step::Alloc),
        any::<usize>().prop_map(Step::Put),
        any::<u8>().prop_map(Step::Get),
        proptest::collection::vec(any::<u8>(), 0..5).prop_map(Step::GetMany),
        (any::<usize>(), len).prop_map(|(which, len)| Step::Truncate(which, len)),
        any::<usize>().prop_map(Step::Drop),
    ]
}

/// Buffer, and its expected contents.
struct Held {
    buffer: LocalBuf,
    fill: u8,
}

impl Held {
    fn check(&self) {
        assert!(self.buffer.iter().all(|byte| *byte == self.fill), "a byte of another's");
    }
}

async fn run(steps: Vec<Step>) {
    let host = Host::new().await;
    let shared = host.connect().await;
    let mut held: Vec<Held> = Vec::new();
    let mut stored: HashMap<u8, (u8, usize)> = HashMap::new();
    let mut fill = 0u8;
    for step in steps {
        match step {
            Step::Alloc(len) => {
                let mut buffer = shared.alloc(len).await.unwrap();
                assert_eq!(buffer.len(), len);
                fill = fill.wrapping_add(1);
                buffer.fill(fill);
                held.push(Held { buffer, fill });
            }
            Step::Put(which) if !held.is_empty() => {
                let Held { buffer, fill } = held.swap_remove(which % held.len());
                let len = buffer.len();
                shared.remove([fill], true).await.unwrap();
                shared.put_buf([fill], buffer, &Default::default()).await.unwrap();
                stored.insert(fill, (fill, len));
            }
            Step::Get(key) => {
                let key = key % fill.max(1) + 1;
                let value = shared.batch_get_buf(&[[key]]).await.unwrap().remove(0).unwrap();
                assert_eq!(value.as_ref().map(|value| value.len()), stored.get(&key).map(|(_, len)| *len));
                held.extend(value.map(|buffer| Held { buffer, fill: key }));
            }
            Step::GetMany(keys) => {
                let keys: Vec<[u8; 1]> = keys.into_iter().map(|key| [key % fill.max(1) + 1]).collect();
                for (value, [key]) in shared.batch_get_buf(&keys).await.unwrap().into_iter().zip(keys) {
                    let value = value.unwrap();
                    assert_eq!(
                        value.as_ref().map(|value| value.len()),
                        stored.get(&key).map(|(_, len)| *len)
                    );
                    held.extend(value.map(|buffer| Held { buffer, fill: key }));
                }
            }
            Step::Truncate(which, len) if !held.is_empty() => {
                let at = which % held.len();
                held[at].buffer.truncate(len.max(1));
            }
            Step::Drop(which) if !held.is_empty() => {
                held.swap_remove(which % held.len());
            }
            Step::Put(_) | Step::Truncate(..) | Step::Drop(_) => {}
        }
        held.iter().for_each(Held::check);
        let mut spans: Vec<_> =
            held.iter().map(|one| (one.buffer.address(), one.buffer.len() as u64)).collect();
        spans.sort_unstable();
        assert!(spans.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0), "two share a byte");
        // Values beyond the buffer have memory of their own, so the buffer holds at most its size.
        assert!(shared.buffer_used() <= 4 << 20);
    }
    drop(held);
    assert_eq!(shared.buffer_used(), 0);
    host.until(|stats| stats.memories == 1 && stats.calls == 0).await;
    drop(shared);
    host.until(|stats| *stats == LocalStats::default()).await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn what_is_held_is_what_is_counted(steps in proptest::collection::vec(step(), 1..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(run(steps));
    }
}
