//! Routes, messages and layouts between ranks that all are in one test.

use std::num::NonZero;

use proptest::prelude::*;

use super::*;

/// Ranks with their tokens: the sizes, the number of choices, and the experts of each token.
#[derive(Clone, Debug)]
struct World {
    sizes: Sizes,
    choices: usize,
    topk: Vec<Vec<i64>>,
    is_active: Vec<bool>,
}

fn world() -> impl Strategy<Value = World> {
    let sizes = (1..5usize, 1..4usize, 0..6usize, 1..3usize, any::<bool>());
    sizes.prop_flat_map(|(ranks, local, tokens, blocks, is_fp8)| {
        let experts = ranks * local;
        let sizes = Sizes::new(ranks, experts, tokens, blocks * BLOCK, is_fp8).unwrap();
        (1..=experts.min(4)).prop_flat_map(move |choices| {
            let all: Vec<i64> = (0..experts as i64).collect();
            let token = (Just(all).prop_shuffle(), prop::collection::vec(any::<bool>(), choices)).prop_map(
                move |(experts, named)| -> Vec<i64> {
                    experts
                        .iter()
                        .zip(named)
                        .map(|(expert, named)| if named { *expert } else { -1 })
                        .collect()
                },
            );
            let of_rank = prop::collection::vec(token, 0..=tokens).prop_map(|tokens| tokens.concat());
            let is_active = prop::collection::vec(prop::bool::weighted(0.8), ranks);
            (prop::collection::vec(of_rank, ranks), is_active).prop_map(move |(topk, is_active)| World {
                sizes,
                choices,
                topk,
                is_active,
            })
        })
    })
}

impl World {
    fn routes(&self, rank: usize) -> Routes {
        Routes::new(&self.topk[rank], self.choices, self.sizes.ranks, self.sizes.experts, rank).unwrap()
    }

    /// Returns the bytes of a token.
    fn row(&self, rank: usize, token: usize) -> Vec<u8> {
        (0..self.sizes.width()).map(|at| (rank * 89 + token * 31 + at * 7) as u8).collect()
    }

    /// Returns the messages of a rank to all ranks.
    fn messages(&self, rank: usize) -> Vec<Vec<u8>> {
        let routes = self.routes(rank);
        let fronts = routes.fronts(&self.sizes, &self.is_active);
        let mut space = vec![9; fronts.iter().sum::<usize>() * self.sizes.width()];
        let runs = routes.write_fronts(&self.sizes, &self.is_active, &mut space).unwrap();
        let (mut rest, mut messages) = (&space[..], Vec::new());
        for (front, runs) in fronts.iter().zip(runs) {
            let (own, others) = rest.split_at(front * self.sizes.width());
            rest = others;
            let tokens = runs.iter().flat_map(|run| run.first..run.first + run.count);
            messages.push([own.to_vec(), tokens.flat_map(|token| self.row(rank, token)).collect()].concat());
        }
        messages
    }

    /// Returns the memory of a rank with the messages of the others, their parts in it, and its own
    /// tokens.
    fn received(&self, rank: usize) -> Received {
        let space = self.sizes.space(self.choices);
        let (mut memory, mut parts) = (Vec::new(), Vec::new());
        for source in 0..self.sizes.ranks {
            let message = self.messages(source).swap_remove(rank);
            let part = Part { first: memory.len() / self.sizes.width(), len: message.len() as u64 };
            parts.push((source != rank).then_some(part));
            assert!(message.len() <= space * self.sizes.width());
            memory.extend(message);
        }
        let wanted = self.is_active.iter().map(|active| active.then_some(space)).collect();
        let tokens = self.topk[rank].len() / self.choices;
        let own = (0..tokens).flat_map(|token| self.row(rank, token)).collect();
        Received { routes: self.routes(rank), memory, own, parts, wanted }
    }

    /// Returns the tokens of a source for an expert of a rank.
    fn tokens(&self, source: usize, rank: usize, expert: usize) -> Vec<usize> {
        if !self.is_active[source] || !self.is_active[rank] {
            return Vec::new();
        }
        let name = (rank * self.sizes.local() + expert) as i64;
        let tokens = self.topk[source].chunks(self.choices).enumerate();
        tokens.filter(|(_, experts)| experts.contains(&name)).map(|(token, _)| token).collect()
    }
}

/// State of a rank before it reads the layout.
struct Received {
    routes: Routes,
    memory: Vec<u8>,
    own: Vec<u8>,
    parts: Vec<Option<Part>>,
    wanted: Vec<Option<usize>>,
}

impl Received {
    fn rows(&self, sizes: &Sizes) -> Rows<'_> {
        Rows::new(sizes.width(), &self.memory, &self.own).unwrap()
    }

    fn layout(&self, sizes: Sizes) -> Result<Layout> {
        Layout::read(sizes, &self.routes, self.rows(&sizes), &self.parts, &self.wanted)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_expert_gets_its_tokens(world in world(), threads in 1..4usize) {
        let sizes = world.sizes;
        for rank in 0..sizes.ranks {
            let received = world.received(rank);
            let layout = received.layout(sizes).unwrap();
            let missing: Vec<_> = (0..sizes.ranks).filter(|one| world.is_active[*one] && !world.is_active[rank]).collect();
            prop_assert_eq!(layout.missing(), missing);
            let (local, slots) = (sizes.local(), sizes.slots());
            let (mut count, mut ranges) = (vec![7; local], vec![7; local * sizes.ranks]);
            let mut sources = vec![7; local * slots];
            layout.write(&mut count, &mut ranges, &mut sources).unwrap();
            let mut elements = vec![7; local * slots * sizes.elements()];
            let mut scales = vec![7; local * slots * sizes.scales()];
            layout.place(received.rows(&sizes), &mut elements, &mut scales, NonZero::new(threads).unwrap()).unwrap();
            for expert in 0..local {
                let mut at = 0;
                for source in 0..sizes.ranks {
                    let tokens = world.tokens(source, rank, expert);
                    prop_assert_eq!(ranges[expert * sizes.ranks + source], (at << 32 | tokens.len()) as i64);
                    for token in tokens {
                        let slot = expert * slots + at;
                        prop_assert_eq!(sources[slot], token as i32);
                        let row = world.row(source, token);
                        let (bytes, scale) = (sizes.elements(), sizes.scales());
                        prop_assert_eq!(&elements[slot * bytes..(slot + 1) * bytes], &row[..bytes]);
                        prop_assert_eq!(&scales[slot * scale..(slot + 1) * scale], &row[bytes..]);
                        at += 1;
                    }
                }
                prop_assert_eq!((count[expert], layout.counts()[expert]), (at as i32, at));
            }
        }
    }

    #[test]
    fn each_token_travels_once_to_a_rank(world in world()) {
        for source in 0..world.sizes.ranks {
            for (rank, message) in world.messages(source).iter().enumerate() {
                let mut tokens: Vec<_> =
                    (0..world.sizes.local()).flat_map(|expert| world.tokens(source, rank, expert)).collect();
                let pairs = tokens.len();
                tokens.sort_unstable();
                tokens.dedup();
                if source == rank {
                    prop_assert_eq!(message.len(), 0);
                } else if world.is_active[source] {
                    let rows = world.sizes.front(pairs) + tokens.len();
                    prop_assert_eq!(message.len(), rows * world.sizes.width());
                }
            }
        }
    }

    #[test]
    fn a_damaged_message_is_refused_or_read(
        world in world(), rank in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), byte: u8, cut: u8,
    ) {
        let mut received = world.received(rank.index(world.sizes.ranks));
        if !received.memory.is_empty() {
            let at = at.index(received.memory.len());
            received.memory[at] = byte;
        }
        if cut > 200 {
            received.parts[0] =
                received.parts[0].map(|part| Part { len: part.len.saturating_sub(u64::from(cut)), ..part });
        }
        // A message is read without a panic, whatever its bytes are.
        if let Ok(layout) = received.layout(world.sizes) {
            let slots = world.sizes.local() * world.sizes.slots();
            let mut elements = vec![0; slots * world.sizes.elements()];
            let mut scales = vec![0; slots * world.sizes.scales()];
            layout.place(received.rows(&world.sizes), &mut elements, &mut scales, NonZero::<usize>::MIN).unwrap();
            let (mut count, mut ranges) = (vec![0; world.sizes.local()], vec![0; world.sizes.local() * world.sizes.ranks]);
            layout.write(&mut count, &mut ranges, &mut vec![0; slots]).unwrap();
        }
    }

    #[test]
    fn rows_come_back_to_their_choices(world in world(), lost in any::<u8>()) {
        let own = world.sizes.ranks - 1;
        let routes = world.routes(own);
        let pairs = routes.pairs();
        let firsts: Vec<_> = (0..world.sizes.ranks).map(|rank| (lost >> rank & 1 == 0).then_some(100 * rank)).collect();
        let own_firsts: Vec<_> = (0..world.sizes.local()).map(|expert| 1000 * (expert + 1)).collect();
        let mut rows = vec![7; world.topk[own].len()];
        routes.rows(&firsts, firsts[own].map(|_| &own_firsts[..]), &mut rows).unwrap();
        // In the order of a rank's pairs, and of those of an own expert, the rows count up.
        let mut next: Vec<_> = (0..world.sizes.ranks as i64).map(|rank| 100 * rank).collect();
        for expert in 0..world.sizes.experts {
            let rank = expert / world.sizes.local();
            if rank == own {
                next[rank] = own_firsts[expert % world.sizes.local()] as i64;
            }
            for (choice, _) in world.topk[own].iter().enumerate().filter(|(_, one)| **one == expert as i64) {
                if firsts[rank].is_some() {
                    prop_assert_eq!(rows[choice], next[rank]);
                    next[rank] += 1;
                } else {
                    prop_assert_eq!(rows[choice], -1);
                }
            }
        }
        prop_assert!(world.topk[own].iter().zip(&rows).all(|(expert, row)| *expert >= 0 || *row == -1));
        prop_assert_eq!(pairs.iter().sum::<usize>(), world.topk[own].iter().filter(|expert| **expert >= 0).count());
    }

    #[test]
    fn sums_are_rounded_once(
        tokens in 1..5usize, choices in 0..4usize, hidden in prop::sample::select(vec![1usize, 130, 1200]),
        split in 0..8usize, seed in any::<u64>(), threads in 1..4usize,
    ) {
        let mut random = seed;
        let mut next = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as u32
        };
        let values: Vec<half::bf16> =
            (0..7 * hidden).map(|_| half::bf16::from_f32(next() as f32 / 1e9 - 1.0)).collect();
        let memory: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        let rows: Vec<i64> = (0..tokens * choices).map(|_| i64::from(next() % 8) - 1).collect();
        let weights: Vec<f32> = rows.iter().map(|_| next() as f32 / 1e9).collect();
        let mut out = vec![7; tokens * hidden * 2];
        let (received, own) = memory.split_at(split * 2 * hidden);
        let memory = Rows::new(2 * hidden, received, own).unwrap();
        add_up(memory, &rows, &weights, &mut out, NonZero::new(threads).unwrap()).unwrap();
        for token in 0..tokens {
            for element in 0..hidden {
                let mut sum = 0f32;
                for choice in token * choices..(token + 1) * choices {
                    if let Ok(row) = usize::try_from(rows[choice]) {
                        sum += weights[choice] * values[row * hidden + element].to_f32();
                    }
                }
                let at = 2 * (token * hidden + element);
                prop_assert_eq!(&out[at..at + 2], &half::bf16::from_f32(sum).to_ne_bytes());
            }
        }
    }
}

/// Returns the value of a code of `e4m3fn`.
fn value_of(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0);
    let magnitude =
        if exponent == 0 { fraction * 2f32.powi(-6) } else { (1.0 + fraction) * 2f32.powi(exponent - 7) };
    if code < 128 { magnitude } else { -magnitude }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn quantized_values_are_near(
        tokens in prop::collection::vec(prop::collection::vec(-1.0f32..1.0, 2 * BLOCK), 0..4),
        exponent in -20i32..20, threads in 1..4usize,
    ) {
        let sizes = Sizes::new(1, 1, 4, 2 * BLOCK, true).unwrap();
        let values: Vec<_> =
            tokens.iter().flatten().map(|value| half::bf16::from_f32(value * 2f32.powi(exponent))).collect();
        let memory: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        let mut rows = vec![7; tokens.len() * sizes.width()];
        quantize(&sizes, &memory, &mut rows, NonZero::new(threads).unwrap()).unwrap();
        for (values, row) in values.chunks(2 * BLOCK).zip(rows.chunks(sizes.width())) {
            let (elements, scales) = row.split_at(2 * BLOCK);
            let blocks = values.chunks(BLOCK).zip(elements.chunks(BLOCK)).zip(scales.as_chunks::<4>().0);
            for ((values, codes), scale) in blocks {
                let most = values.iter().map(|value| value.to_f32().abs()).fold(1e-4, f32::max);
                let scale = f32::from_ne_bytes(*scale);
                prop_assert_eq!(scale, most / 448.0);
                for (value, code) in values.iter().zip(codes) {
                    let away = (value_of(*code) * scale - value.to_f32()).abs();
                    // Half of the last of three bits, and half of the least code.
                    prop_assert!(away <= value.to_f32().abs() / 15.9 + scale / 1000.0, "{value} {code}");
                }
            }
        }
    }
}

#[test]
fn values_that_are_not_finite_spoil_their_block_only() {
    let sizes = Sizes::new(1, 1, 1, 2 * BLOCK, true).unwrap();
    for (value, is_nan) in [(f32::NAN, true), (f32::INFINITY, false)] {
        let mut values = vec![half::bf16::ONE; 2 * BLOCK];
        values[5] = half::bf16::from_f32(value);
        let memory: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        let mut rows = vec![7; sizes.width()];
        quantize(&sizes, &memory, &mut rows, NonZero::<usize>::MIN).unwrap();
        let (elements, scales) = rows.split_at(2 * BLOCK);
        assert_eq!(elements[5] & 0x7f, 0x7f);
        assert_eq!(elements[6] & 0x7f, if is_nan { 0x7f } else { 0 });
        assert!(elements[BLOCK..].iter().all(|element| *element == 0x7e));
        assert!(!f32::from_ne_bytes(scales.as_chunks::<4>().0[0]).is_finite());
    }
    assert!(quantize(&sizes, &[0; 2 * BLOCK], &mut [0; 264], NonZero::<usize>::MIN).is_err());
}

#[test]
fn wrong_choices_are_refused() {
    for (topk, text) in
        [(&[0, 4][..], "out of range"), (&[-2, 0][..], "out of range"), (&[3, 3][..], "twice")]
    {
        assert!(Routes::new(topk, 2, 2, 4, 0).unwrap_err().to_string().contains(text));
    }
    assert!(Routes::new(&[0, 1, 2], 2, 2, 4, 0).is_err());
    assert!(Routes::new(&[0, 1], 2, 3, 4, 0).is_err());
    assert!(Routes::new(&[0, 1], 2, 2, 4, 2).is_err());
    for (ranks, experts, hidden) in
        [(0, 4, 128), (65, 65, 128), (3, 4, 128), (2, 0, 128), (2, 4, 0), (2, 4, 200)]
    {
        assert!(Sizes::new(ranks, experts, 4, hidden, false).is_err());
    }
}

#[test]
fn ranks_with_other_sizes_are_named() {
    let sizes = |tokens, hidden, is_fp8| Sizes::new(2, 4, tokens, hidden, is_fp8).unwrap();
    let here = sizes(4, 256, false);
    let others = [
        (sizes(5, 256, false), "num_max_dispatch_tokens_per_rank"),
        (sizes(4, 384, false), "hidden"),
        (sizes(4, 256, true), "use_fp8"),
        (Sizes::new(2, 6, 4, 256, false).unwrap(), "num_experts"),
    ];
    for (there, name) in others {
        let routes = Routes::new(&[0, 1], 2, 2, there.experts, 1).unwrap();
        let fronts = routes.fronts(&there, &[true, true]);
        let mut memory = vec![0; fronts.iter().sum::<usize>() * there.width()];
        routes.write_fronts(&there, &[true, true], &mut memory).unwrap();
        memory.resize(memory.len().next_multiple_of(here.width()), 0);
        let routes = Routes::new(&[0, 1], 2, 2, 4, 1).unwrap();
        let rows = Rows::new(here.width(), &memory, &[]).unwrap();
        let parts = [Some(Part { first: 0, len: 4096 }), None];
        let error = Layout::read(here, &routes, rows, &parts, &[Some(9), None]).unwrap_err();
        assert!(error.to_string().contains(&format!("do not agree on {name}. ")), "{error}");
    }
}
