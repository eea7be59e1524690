//! Collective calls: what a rank passes to an operation, and what it moves where.

use std::hash::Hasher;
use std::ops::Range;

use mooncake_core::{Error, Result};

use crate::reduce::Reduction;
use crate::view::{MAX_RANKS, Slot};

/// Memory of the caller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Buffer {
    /// Address of the first byte.
    pub address: usize,
    /// Length in bytes. The address of an empty buffer has no meaning.
    pub len: usize,
}

impl Buffer {
    /// Returns the buffer of a slice.
    pub fn of(bytes: &mut [u8]) -> Self {
        Self { address: bytes.as_mut_ptr().expose_provenance(), len: bytes.len() }
    }

    /// Returns a part, or `None` if the part is not inside.
    pub fn part(self, range: Range<usize>) -> Option<Self> {
        (range.start <= range.end && range.end <= self.len)
            .then(|| Self { address: self.address + range.start, len: range.end - range.start })
    }

    /// Returns whether both have a byte in common.
    fn overlaps(self, other: Buffer) -> bool {
        self.address < other.address + other.len && other.address < self.address + self.len
    }

    pub(crate) fn as_ptr(self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.address)
    }
}

/// Buffers by slot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Buffers {
    /// Buffer of each slot, in order.
    List(Vec<Buffer>),
    /// Buffers of equal length, one after the other in one buffer. The buffer may end early: the
    /// slots behind its end have no buffer.
    Flat {
        /// Buffer with the pieces of all slots.
        whole: Buffer,
        /// Length of each piece in bytes.
        piece: usize,
    },
}

impl Buffers {
    /// Cuts a buffer into pieces of these lengths, one per slot.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the pieces are longer than the buffer.
    pub fn split(whole: Buffer, lengths: &[usize]) -> Result<Self> {
        let mut from = 0usize;
        let pieces: Option<Vec<Buffer>> = lengths
            .iter()
            .map(|len| {
                let piece = whole.part(from..from.checked_add(*len)?);
                from += len;
                piece
            })
            .collect();
        let too_short =
            || Error::invalid(format!("cannot split buffer: the pieces are longer. len={}", whole.len));
        pieces.map(Buffers::List).ok_or_else(too_short)
    }

    fn overlap(&self, other: Buffer) -> bool {
        match self {
            Buffers::List(list) => list.iter().any(|buffer| buffer.overlaps(other)),
            Buffers::Flat { whole, .. } => whole.overlaps(other),
        }
    }

    /// Returns the buffer of a slot.
    pub fn of(&self, slot: Slot) -> Option<Buffer> {
        let at = usize::from(slot.0);
        match self {
            Buffers::List(list) => list.get(at).copied(),
            Buffers::Flat { whole, piece } => {
                let from = at.checked_mul(*piece)?;
                whole.part(from..from.checked_add(*piece)?)
            }
        }
    }
}

/// Collective operation with its memory.
#[derive(Clone, PartialEq, Debug)]
pub enum Collective {
    /// Waits until every active rank has called it.
    Barrier,
    /// Reduces the tensors of all ranks, in place on every rank.
    AllReduce {
        /// Input and result.
        tensor: Buffer,
        /// Operator and element type.
        reduction: Reduction,
    },
    /// Reduces the tensors of all ranks, in place on the root. The tensors of others are unchanged.
    Reduce {
        /// Input, and on the root the result.
        tensor: Buffer,
        /// Operator and element type.
        reduction: Reduction,
        /// Slot of the result.
        root: Slot,
    },
    /// Reduces a piece for each slot.
    ReduceScatter {
        /// Piece for each slot.
        inputs: Buffers,
        /// Result of the own piece.
        output: Buffer,
        /// Operator and element type.
        reduction: Reduction,
    },
    /// Copies the tensor of the root to every rank.
    Broadcast {
        /// Input on the root, and result on the others.
        tensor: Buffer,
        /// Slot of the input.
        root: Slot,
    },
    /// Copies the tensor of each rank to every rank.
    AllGather {
        /// Tensor of this rank.
        input: Buffer,
        /// Result for each slot.
        outputs: Buffers,
    },
    /// Copies the tensor of each rank to the root.
    Gather {
        /// Tensor of this rank.
        input: Buffer,
        /// Result for each slot, on the root.
        outputs: Option<Buffers>,
        /// Slot of the results.
        root: Slot,
    },
    /// Copies a piece of the root to each rank.
    Scatter {
        /// Piece for each slot, on the root.
        inputs: Option<Buffers>,
        /// Result on this rank.
        output: Buffer,
        /// Slot of the pieces.
        root: Slot,
    },
    /// Copies a piece from each rank to each rank. Lengths may differ.
    AllToAll {
        /// Piece for each slot.
        inputs: Buffers,
        /// Result from each slot.
        outputs: Buffers,
    },
}

impl Collective {
    /// Returns a digest by which ranks find out that they call different operations.
    pub(crate) fn digest(&self) -> u64 {
        let mut hash = std::hash::DefaultHasher::new();
        let mut add = |kind: u8, len: usize, reduction: Option<&Reduction>, root: Option<&Slot>| {
            hash.write_u8(kind);
            hash.write_usize(len);
            hash.write_u16(
                reduction.map_or(u16::MAX, |r| u16::from_le_bytes([r.dtype().code(), r.op() as u8])),
            );
            hash.write_u8(root.map_or(u8::MAX, |root| root.0));
        };
        match self {
            Self::Barrier => add(0, 0, None, None),
            Self::AllReduce { tensor, reduction } => add(1, tensor.len, Some(reduction), None),
            Self::Reduce { tensor, reduction, root } => add(2, tensor.len, Some(reduction), Some(root)),
            Self::ReduceScatter { output, reduction, .. } => add(3, output.len, Some(reduction), None),
            Self::Broadcast { tensor, root } => add(4, tensor.len, None, Some(root)),
            Self::AllGather { input, .. } => add(5, input.len, None, None),
            Self::Gather { input, root, .. } => add(6, input.len, None, Some(root)),
            Self::Scatter { output, root, .. } => add(7, output.len, None, Some(root)),
            Self::AllToAll { .. } => add(8, 0, None, None),
        }
        hash.finish()
    }

    /// Checks the parts that do not depend on other ranks.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for a root without the memory that a root needs, or for cut elements.
    pub(crate) fn check(&self, own: Slot, capacity: usize) -> Result<()> {
        let fault = match self {
            Self::Reduce { root, .. }
            | Self::Broadcast { root, .. }
            | Self::Gather { root, .. }
            | Self::Scatter { root, .. }
                if usize::from(root.0) >= capacity =>
            {
                Some("the root is not a slot of the group")
            }
            Self::Gather { outputs: None, root, .. } if *root == own => Some("the root has no outputs"),
            Self::Scatter { inputs: None, root, .. } if *root == own => Some("the root has no inputs"),
            Self::AllReduce { tensor: Buffer { len, .. }, reduction }
            | Self::Reduce { tensor: Buffer { len, .. }, reduction, .. }
            | Self::ReduceScatter { output: Buffer { len, .. }, reduction, .. }
                if !len.is_multiple_of(reduction.dtype().bytes()) =>
            {
                Some("an element is cut")
            }
            _ => None,
        };
        fault.map_or(Ok(()), |fault| Err(Error::invalid(format!("cannot start collective: {fault}"))))
    }
}

/// Longest data that a message carries itself. Longer data is staged, and the receiver reads it by
/// the transfer engine. Measured on one host; see `docs/design-pg.md`.
const INLINE_BYTES: usize = 32 << 10;

/// Limit of a measurement, in place of [`INLINE_BYTES`].
#[cfg(test)]
pub(crate) static MEASURED_INLINE_BYTES: std::sync::atomic::AtomicUsize =
    std::sync::atomic::AtomicUsize::new(INLINE_BYTES);

/// Returns the length of the longest data that a message carries itself. It is the same on every
/// rank.
pub(crate) fn inline_bytes() -> usize {
    #[cfg(test)]
    return MEASURED_INLINE_BYTES.load(std::sync::atomic::Ordering::Relaxed);
    #[cfg(not(test))]
    INLINE_BYTES
}

/// Longest tensor of a reduction that every rank receives whole, times the number of other ranks.
/// Above that, each rank reduces one block and the blocks are gathered.
const WHOLE_BYTES: usize = 64 << 10;

/// Destination of data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// Memory of the caller.
    To(Buffer),
    /// No buffer of the caller is for these bytes: the operation fails.
    Missing,
}

/// Data that one rank moves in a collective operation, among the present participants.
///
/// Participants are numbers of slots in ascending order. The input is staged before anything else:
/// the buffers of `staged`, one after the other. So the caller's memory may be overwritten
/// afterwards, and the operation can be repeated.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Plan {
    /// First part: a range of the staged input for other participants.
    pub(crate) offers: Vec<(u8, Range<usize>)>,
    /// First part: participants, with the destinations of their whole offers.
    pub(crate) places: Vec<(u8, Place)>,
    /// Copy of a range of the own input, with its destination.
    pub(crate) own: Option<(Range<usize>, Place)>,
    /// Reduction of the offers of the first part.
    pub(crate) fold: Option<Fold>,
}

/// Reduction of the own range and of the offers of all other participants, in ascending order.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Fold {
    pub(crate) reduction: Reduction,
    /// Range of the own input, of the same length as each offer.
    pub(crate) own: Range<usize>,
    /// Destination of the result.
    pub(crate) result: Option<Place>,
    /// Second part: participants that receive the result.
    pub(crate) receivers: Vec<u8>,
    /// Second part: participants, with the destinations of their results.
    pub(crate) places: Vec<(u8, Place)>,
}

/// Input of a collective operation: buffers that are staged one after the other.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Input {
    pub(crate) staged: Vec<Buffer>,
    /// Range of each slot's piece, or of the whole for every slot.
    ranges: Vec<Range<usize>>,
    pub(crate) len: usize,
}

impl Input {
    pub(crate) fn whole(buffer: Buffer) -> Self {
        Self::joined(vec![buffer])
    }

    /// Joins buffers into one piece for every slot.
    pub(crate) fn joined(buffers: Vec<Buffer>) -> Self {
        let len = buffers.iter().map(|buffer| buffer.len).sum();
        Self { staged: buffers, ranges: vec![0..len; MAX_RANKS], len }
    }

    fn pieces(buffers: &Buffers, slots: impl Iterator<Item = u8>) -> Self {
        let mut input = Self { ranges: vec![0..0; MAX_RANKS], ..Self::default() };
        for slot in slots {
            if let Some(buffer) = buffers.of(Slot(slot)) {
                input.staged.push(buffer);
                input.ranges[usize::from(slot)] = input.len..input.len + buffer.len;
                input.len += buffer.len;
            }
        }
        input
    }

    /// Returns the memory of a range, if it lies in one buffer.
    pub(crate) fn part(&self, range: Range<usize>) -> Option<Buffer> {
        let mut offset = 0;
        for buffer in &self.staged {
            if offset <= range.start && range.end <= offset + buffer.len {
                return buffer.part(range.start - offset..range.end - offset);
            }
            offset += buffer.len;
        }
        None
    }

    fn of(&self, slot: u8) -> Range<usize> {
        self.ranges.get(usize::from(slot)).cloned().unwrap_or_default()
    }
}

/// Returns the set bits in ascending order.
pub(crate) fn bits(set: u64) -> impl DoubleEndedIterator<Item = u8> + Clone {
    (0..MAX_RANKS as u8).filter(move |slot| set >> slot & 1 != 0)
}

impl Collective {
    /// Returns the input of this rank, with pieces for the slots of `members`.
    pub(crate) fn input(&self, own: u8, members: u64) -> Input {
        match self {
            Self::Barrier => Input::default(),
            Self::AllReduce { tensor, .. } | Self::Reduce { tensor, .. } => Input::whole(*tensor),
            Self::Broadcast { tensor, root } if root.0 == own => Input::whole(*tensor),
            Self::Broadcast { .. } => Input::default(),
            Self::AllGather { input, .. } | Self::Gather { input, .. } => Input::whole(*input),
            Self::Scatter { inputs: Some(inputs), root, .. } if root.0 == own => {
                Input::pieces(inputs, bits(members))
            }
            Self::Scatter { .. } => Input::default(),
            Self::ReduceScatter { inputs, .. } | Self::AllToAll { inputs, .. } => {
                Input::pieces(inputs, bits(members))
            }
        }
    }

    /// Returns the plan of this rank among `members`, a set that contains `own`.
    pub(crate) fn plan(&self, own: u8, members: u64, input: &Input) -> Plan {
        let others: Vec<u8> = starting_after(own, members);
        let whole_to = |to: &[u8]| to.iter().map(|slot| (*slot, 0..input.len)).collect();
        let from = |outputs: &Buffers, slots: &[u8]| {
            let place = |slot: &u8| (*slot, outputs.of(Slot(*slot)).map_or(Place::Missing, Place::To));
            slots.iter().map(place).collect::<Vec<_>>()
        };
        let own_place = |outputs: &Buffers| outputs.of(Slot(own)).map_or(Place::Missing, Place::To);
        let is_present = |slot: &Slot| members >> slot.0 & 1 != 0;
        match self {
            Self::Barrier => Plan::default(),
            Self::AllReduce { tensor, reduction } => reduce(*tensor, *reduction, own, members, &others, None),
            Self::Reduce { tensor, reduction, root } => {
                reduce(*tensor, *reduction, own, members, &others, Some(root.0))
            }
            Self::ReduceScatter { output, reduction, .. } => Plan {
                offers: others.iter().map(|slot| (*slot, input.of(*slot))).collect(),
                fold: Some(Fold {
                    reduction: *reduction,
                    own: input.of(own),
                    result: Some(Place::To(*output)),
                    receivers: Vec::new(),
                    places: Vec::new(),
                }),
                ..Plan::default()
            },
            Self::Broadcast { root, .. } if root.0 == own => {
                Plan { offers: whole_to(&others), ..Plan::default() }
            }
            Self::Broadcast { tensor, root } if is_present(root) => {
                Plan { places: vec![(root.0, Place::To(*tensor))], ..Plan::default() }
            }
            Self::AllGather { outputs, .. } => Plan {
                offers: whole_to(&others),
                places: from(outputs, &others),
                own: Some((0..input.len, own_place(outputs))),
                ..Plan::default()
            },
            Self::Gather { outputs: Some(outputs), root, .. } if root.0 == own => Plan {
                places: from(outputs, &others),
                own: Some((0..input.len, own_place(outputs))),
                ..Plan::default()
            },
            Self::Gather { root, .. } if is_present(root) => {
                Plan { offers: whole_to(&[root.0]), ..Plan::default() }
            }
            Self::Scatter { output, root, .. } if root.0 == own => Plan {
                offers: others.iter().map(|slot| (*slot, input.of(*slot))).collect(),
                own: Some((input.of(own), Place::To(*output))),
                ..Plan::default()
            },
            Self::Scatter { output, root, .. } if is_present(root) => {
                Plan { places: vec![(root.0, Place::To(*output))], ..Plan::default() }
            }
            Self::AllToAll { outputs, .. } => Plan {
                offers: others.iter().map(|slot| (*slot, input.of(*slot))).collect(),
                places: from(outputs, &others),
                own: Some((input.of(own), own_place(outputs))),
                ..Plan::default()
            },
            // The root has failed.
            Self::Broadcast { .. } | Self::Gather { .. } | Self::Scatter { .. } => Plan::default(),
        }
    }

    /// Returns the range of the input that only this rank uses, if nothing writes it before the
    /// operation is over. The result of an own block is written at the end.
    pub(crate) fn unstaged(&self, own: u8, plan: &Plan, input: &Input) -> Option<Range<usize>> {
        let stays = |inputs: &Buffers, is_overwritten: &dyn Fn(Buffer) -> bool| {
            inputs.of(Slot(own)).filter(|piece| !is_overwritten(*piece)).map(|_| input.of(own))
        };
        let range = match self {
            Self::AllReduce { .. } | Self::Reduce { .. } => {
                let fold = plan.fold.as_ref()?;
                let is_late = fold.result.is_none() || !fold.receivers.is_empty();
                (is_late && fold.own.len() < input.len).then(|| fold.own.clone())
            }
            Self::ReduceScatter { inputs, output, .. } => stays(inputs, &|piece| output.overlaps(piece)),
            Self::Scatter { inputs: Some(inputs), output, .. } => {
                stays(inputs, &|piece| output.overlaps(piece))
            }
            Self::AllToAll { inputs, outputs } => stays(inputs, &|piece| outputs.overlap(piece)),
            _ => None,
        };
        range.filter(|range| !range.is_empty())
    }

    /// Returns the tensor if it is both input and result. A rank that is left out of the operation
    /// gets its input back.
    pub(crate) fn in_place(&self) -> Option<Buffer> {
        match self {
            Self::AllReduce { tensor, .. } | Self::Reduce { tensor, .. } => Some(*tensor),
            _ => None,
        }
    }
}

/// Returns the participants beside `own`, beginning after it, so that not all ranks begin with the
/// same one.
fn starting_after(own: u8, members: u64) -> Vec<u8> {
    let others = bits(members & !(1 << own));
    others.clone().filter(|slot| *slot > own).chain(others.filter(|slot| *slot < own)).collect()
}

/// Returns the plan of a reduction of whole tensors, to all participants or to `root`.
fn reduce(
    tensor: Buffer,
    reduction: Reduction,
    own: u8,
    members: u64,
    others: &[u8],
    root: Option<u8>,
) -> Plan {
    let receives = |slot: u8| root.is_none_or(|root| root == slot);
    if root.is_some_and(|root| members >> root & 1 == 0) {
        return Plan::default();
    }
    let all = 0..tensor.len;
    if tensor.len.saturating_mul(others.len()) <= WHOLE_BYTES {
        let fold = Fold {
            reduction,
            own: all.clone(),
            result: Some(Place::To(tensor)),
            receivers: Vec::new(),
            places: Vec::new(),
        };
        return Plan {
            offers: others.iter().filter(|slot| receives(**slot)).map(|slot| (*slot, all.clone())).collect(),
            fold: receives(own).then_some(fold),
            ..Plan::default()
        };
    }
    let block = |slot: u8| block(tensor.len, reduction.dtype().bytes(), slot, members);
    let place = |slot: u8| {
        // A block lies inside of the tensor by construction.
        tensor.part(block(slot)).map_or(Place::Missing, Place::To)
    };
    Plan {
        offers: others.iter().map(|slot| (*slot, block(*slot))).collect(),
        fold: Some(Fold {
            reduction,
            own: block(own),
            result: receives(own).then(|| place(own)),
            receivers: others.iter().copied().filter(|slot| receives(*slot)).collect(),
            places: if receives(own) {
                others.iter().map(|slot| (*slot, place(*slot))).collect()
            } else {
                Vec::new()
            },
        }),
        ..Plan::default()
    }
}

/// Returns the range of the tensor that a participant reduces: about equal parts, cut at cache
/// lines.
fn block(len: usize, element: usize, slot: u8, members: u64) -> Range<usize> {
    let unit = element.max(64);
    let count = members.count_ones() as usize;
    let index = (members & ((1 << slot) - 1)).count_ones() as usize;
    let units = len.div_ceil(unit);
    let at = |index: usize| (units * index / count * unit).min(len);
    at(index)..at(index + 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dtype::DType;
    use crate::reduce::ReduceOp;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn blocks_cover_a_tensor_once(units in 0usize..5000, size in 0usize..5, members in 1u64..) {
            let element = 1 << size;
            let (mut next, len) = (0, units * element);
            for slot in bits(members) {
                let block = block(len, element, slot, members);
                prop_assert_eq!(block.start, next);
                prop_assert!(block.start.is_multiple_of(element) && block.end.is_multiple_of(element));
                next = block.end;
            }
            prop_assert_eq!(next, len);
        }

        /// Every offer has a receiver that expects that many bytes, and the other way round.
        #[test]
        fn plans_of_all_members_fit_together(len in 0usize..100_000, members in 1u64.., kind in 0u8..9, root: u8) {
            let slots: Vec<u8> = bits(members).collect();
            let root = Slot(slots[usize::from(root) % slots.len()]);
            let reduction = Reduction::new(DType::F32, ReduceOp::Sum).unwrap();
            let tensor = Buffer { address: 0, len: len * 4 };
            let each = Buffers::Flat { whole: Buffer { address: 0, len: len * 4 * 64 }, piece: len * 4 };
            let call = match kind {
                0 => Collective::Barrier,
                1 => Collective::AllReduce { tensor, reduction },
                2 => Collective::Reduce { tensor, reduction, root },
                3 => Collective::ReduceScatter { inputs: each, output: tensor, reduction },
                4 => Collective::Broadcast { tensor, root },
                5 => Collective::AllGather { input: tensor, outputs: each },
                6 => Collective::Gather { input: tensor, outputs: Some(each), root },
                7 => Collective::Scatter { inputs: Some(each), output: tensor, root },
                _ => Collective::AllToAll { inputs: each.clone(), outputs: each },
            };
            let plans: Vec<(u8, Plan)> =
                slots.iter().map(|own| (*own, call.plan(*own, members, &call.input(*own, members)))).collect();
            let of = |slot: u8| &plans.iter().find(|(own, _)| *own == slot).unwrap().1;
            for (own, plan) in &plans {
                for (to, range) in &plan.offers {
                    let peer = of(*to);
                    let placed = peer.places.iter().find(|(from, _)| from == own);
                    let expected = match (placed, &peer.fold) {
                        (Some((_, Place::To(buffer))), _) => buffer.len,
                        (None, Some(fold)) => fold.own.len(),
                        other => panic!("{own} offers to {to}, which has {other:?}"),
                    };
                    prop_assert_eq!(expected, range.len());
                }
                for (from, _) in &plan.places {
                    prop_assert!(of(*from).offers.iter().any(|(to, _)| to == own));
                }
                if let Some(fold) = &plan.fold {
                    for other in slots.iter().filter(|slot| *slot != own) {
                        prop_assert!(of(*other).offers.iter().any(|(to, _)| to == own));
                    }
                    for (from, place) in &fold.places {
                        let peer = of(*from).fold.as_ref().unwrap();
                        prop_assert!(peer.receivers.contains(own));
                        let Place::To(buffer) = place else { panic!("no place") };
                        prop_assert_eq!(buffer.len, peer.own.len());
                    }
                }
            }
        }
    }

    #[test]
    fn pieces_beyond_a_short_buffer_are_missing() {
        let whole = Buffer { address: 64, len: 30 };
        let flat = Buffers::Flat { whole, piece: 10 };
        assert_eq!(flat.of(Slot(2)), Some(Buffer { address: 84, len: 10 }));
        assert_eq!(flat.of(Slot(3)), None);
        let split = Buffers::split(whole, &[3, 0, 27]).unwrap();
        assert_eq!(split.of(Slot(2)), Some(Buffer { address: 67, len: 27 }));
        assert!(Buffers::split(whole, &[3, 28]).is_err());
    }
}
