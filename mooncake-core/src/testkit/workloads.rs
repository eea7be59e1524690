//! Made workloads with fixed seeds, to measure eviction policies. Each is a list of requests; see
//! [`simulate`](super::simulate).

use crate::clock::Rng;

/// Requests, each a chain of block ids.
pub type Requests = Vec<Vec<u64>>;

/// Made workload of 400,000 uses.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// Name in one word.
    pub name: &'static str,
    /// Description of the requests.
    pub about: &'static str,
    make: fn(u64) -> Requests,
}

const USES: usize = 400_000;

/// Made workloads.
pub const WORKLOADS: &[Workload] = &[
    Workload { name: "uniform", about: "30,000 keys, all alike", make: |seed| uniform(30_000, USES, seed) },
    Workload {
        name: "zipf-0.8",
        about: "100,000 keys by Zipf's law, exponent 0.8",
        make: |seed| zipf(0.8, 100_000, USES, seed),
    },
    Workload {
        name: "zipf-1.0",
        about: "100,000 keys by Zipf's law, exponent 1.0",
        make: |seed| zipf(1.0, 100_000, USES, seed),
    },
    Workload {
        name: "scans",
        about: "Zipf 0.9, a quarter of the uses scan new keys",
        make: |seed| zipf_with_scans(0.9, 100_000, USES, seed),
    },
    Workload {
        name: "moving",
        about: "Zipf 1.0, on new keys after every 50,000 uses",
        make: |seed| moving_zipf(1.0, 100_000, 50_000, USES, seed),
    },
    Workload { name: "loop", about: "12,000 keys in a loop", make: |_| chain_loop(12_000, 1, USES as u64) },
    Workload {
        name: "chain-loop",
        about: "750 chains of 16 blocks in a loop",
        make: |_| chain_loop(750, 16, USES as u64),
    },
    Workload {
        name: "documents",
        about: "10,000 documents of 16 blocks by Zipf 0.9, each with two new blocks",
        make: |seed| documents(0.9, 10_000, USES, seed),
    },
    Workload {
        name: "conversations",
        about: "12,000 requests, each followed by another with a chance of one half",
        make: |seed| conversations(12_000, seed),
    },
];

impl Workload {
    /// Returns the workload with a name.
    pub fn by_name(name: &str) -> Option<Self> {
        WORKLOADS.iter().find(|workload| workload.name == name).copied()
    }

    /// Returns the requests. Equal seeds give equal requests.
    pub fn requests(&self, seed: u64) -> Requests {
        (self.make)(seed)
    }
}

/// Returns uses of `keys` keys, all equally likely.
pub fn uniform(keys: u64, uses: usize, seed: u64) -> Requests {
    let mut rng = Rng::seeded(seed);
    (0..uses).map(|_| vec![rng.below(keys)]).collect()
}

/// Returns uses of `keys` keys by Zipf's law with this exponent.
pub fn zipf(exponent: f64, keys: usize, uses: usize, seed: u64) -> Requests {
    let (law, mut rng) = (Zipf::new(exponent, keys), Rng::seeded(seed));
    (0..uses).map(|_| vec![law.draw(&mut rng)]).collect()
}

/// Returns uses by Zipf's law, of which a quarter, in runs of a thousand, read keys once.
pub fn zipf_with_scans(exponent: f64, keys: usize, uses: usize, seed: u64) -> Requests {
    let (law, mut rng, mut scanned) = (Zipf::new(exponent, keys), Rng::seeded(seed), keys as u64);
    let use_at = |at: usize| {
        if at % 4000 < 1000 {
            scanned += 1;
            vec![scanned]
        } else {
            vec![law.draw(&mut rng)]
        }
    };
    (0..uses).map(use_at).collect()
}

/// Returns uses by Zipf's law that moves to new keys after every `stay` uses.
pub fn moving_zipf(exponent: f64, keys: usize, stay: usize, uses: usize, seed: u64) -> Requests {
    let (law, mut rng) = (Zipf::new(exponent, keys), Rng::seeded(seed));
    (0..uses).map(|at| vec![(at / stay * keys) as u64 + law.draw(&mut rng)]).collect()
}

/// Returns a loop over `chains` chains of `blocks` blocks, with `uses` blocks in all.
pub fn chain_loop(chains: u64, blocks: u64, uses: u64) -> Requests {
    let chain = |at: u64| (at % chains * blocks..(at % chains + 1) * blocks).collect();
    (0..uses / blocks).map(chain).collect()
}

/// Returns requests about documents of 16 blocks, chosen by Zipf's law, each with two blocks of its
/// own behind them.
pub fn documents(exponent: f64, documents: usize, uses: usize, seed: u64) -> Requests {
    const BLOCKS: u64 = 16;
    let (law, mut rng) = (Zipf::new(exponent, documents), Rng::seeded(seed));
    let own = documents as u64 * BLOCKS;
    let request = |at: u64| {
        let document = law.draw(&mut rng);
        (document * BLOCKS..(document + 1) * BLOCKS).chain(own + 2 * at..own + 2 * at + 2).collect()
    };
    (0..uses as u64 / (BLOCKS + 2)).map(request).collect()
}

/// Returns conversations of which each turn is followed by another with a chance of one half, after
/// a pause with a log-normal distribution. There is nothing to learn but the pause.
pub fn conversations(requests: usize, seed: u64) -> Requests {
    let mut rng = Rng::seeded(seed);
    let mut due: std::collections::BTreeMap<(u64, u64), Vec<u64>> = std::collections::BTreeMap::new();
    let (mut made, mut fresh, mut time, mut ticket) = (Vec::with_capacity(requests), 1u64, 0u64, 0u64);
    while made.len() < requests {
        time += 1000;
        let mut chain = match due.first_entry() {
            Some(next) if next.key().0 <= time => next.remove(),
            _ => vec![0],
        };
        let growth = 1 + rng.below(15);
        chain.extend(fresh..fresh + growth);
        fresh += growth;
        if rng.below(2) == 0 {
            let pause = (11.5 + normal(&mut rng)).exp() as u64;
            ticket += 1;
            due.insert((time + pause, ticket), chain.clone());
        }
        made.push(chain);
    }
    made
}

/// Returns a number with a standard normal distribution, nearly: a sum of twelve even ones.
fn normal(rng: &mut Rng) -> f64 {
    (0..12).map(|_| even(rng)).sum::<f64>() - 6.0
}

/// Returns a number from 0 to 1.
fn even(rng: &mut Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

struct Zipf {
    /// Chance of a rank up to this one.
    up_to: Vec<f64>,
}

impl Zipf {
    fn new(exponent: f64, keys: usize) -> Self {
        let mut sum = 0.0;
        let mut up_to: Vec<f64> = (1..=keys)
            .map(|rank| {
                sum += (rank as f64).powf(-exponent);
                sum
            })
            .collect();
        up_to.iter_mut().for_each(|chance| *chance /= sum);
        Self { up_to }
    }

    fn draw(&self, rng: &mut Rng) -> u64 {
        let chance = even(rng);
        self.up_to.partition_point(|up_to| *up_to < chance).min(self.up_to.len() - 1) as u64
    }
}
