//! Communicators: the operations of one group on this rank.
//!
//! Collective operations of a communicator run one after the other, in the order of their calls.
//! Communicators, point-to-point operations and exchanges run beside each other.
//!
//! # Agreement on failures
//!
//! Every participant that finishes an operation has combined the same set of participants.
//! Participants agree on that set by *rounds*. A round is (mask, number, absent): the mask of the
//! view, the number of the attempt since that mask, and the active slots that have failed in it.
//! The participants of a round are the active slots that are not absent. Rounds only grow.
//!
//! - A participant that enters a round sends its *progress* to all participants: the round, and the
//!   number of its next operation. The progress is a promise: the participant finishes no operation
//!   in an earlier round.
//! - A participant begins an operation in a round when every participant of the round has promised
//!   it.
//! - A participant that has all data of an operation sends *ready*. It finishes the operation when
//!   every participant of the round is ready. So no participant finishes an operation while another
//!   one lacks data.
//! - A participant that sees a failure (a connection has ended, or a process does not respond
//!   within the collective timeout) enters the round with that slot absent. The others follow its
//!   progress. The operation is then repeated in this round, from the staged copy of the input.
//! - If a participant has finished the operation before it enters the later round, its progress
//!   says so: the number of its next operation is higher, and the round in which it finished comes
//!   with it. A participant that was ready in that round has the same result, and finishes as well.
//!   Any other participant was absent from that round; the operation fails there, because it is
//!   left out.
//! - A rank that was stopped may find all others ready and yet left out of their later round. A
//!   participant that leaves a round tells this to the absent slots, and to those that a new view
//!   has removed. A rank takes all messages that have arrived before it finishes an operation. It
//!   finishes none in a round that a participant has left in this way, unless that participant has
//!   finished it. That message may still be on its way. So a rank that was stopped for a while
//!   begins a new round before it finishes, in which every participant says where it is. If no
//!   other participant is left by then, none goes on without the rank, and it finishes.
//! - A rank that was left out counts the operation as over. While others still carry that operation
//!   out, the rank is absent there. From the next operation on, it takes part again if its slot is
//!   still active: after a round with absent slots, each operation begins a new round.
//! - A change of the mask is a round like any other: an unfinished operation is repeated among the
//!   participants of the new view. A message of an earlier round is dropped. A message of a later
//!   mask waits for the view.
//! - A participant that has just become active does not know the number of the next operation. It
//!   takes the highest one that the participants announce in the round.
//!
//! Rounds cost messages only when something has changed: operations without failures follow each
//! other in one round.
//!
//! # Memory
//!
//! Data of up to 32 KiB travels in messages. Longer data is staged in memory
//! that is registered with the transfer engine, and the receiver reads it from there. No rank
//! writes into the memory of another one, so that a late transfer of a failed rank harms nothing.
//! The staged bytes stay until all participants are ready, and a participant that still reads is
//! not ready. If an attempt is given up, they may be freed earlier. Then the stamp before them is
//! erased, and a reader looks at the stamp after the bytes. So a rank that was stopped in a read
//! never takes the bytes of a later message for its own.
//!
//! The bytes of a participant reach the caller's memory when the operation is finished: all of
//! them, or none if the participant has failed. They are read apart until then. Only reduced
//! blocks are read into the caller's memory at once, because every attempt writes all of them.

mod arrivals;
mod collective;
mod communicator;
mod counted;
mod exchange;
mod executor;
mod p2p;
mod pairs;
mod recipient;
mod shared;
#[cfg(test)]
mod tests;
mod transfer;

pub use communicator::Communicator;
pub use shared::CommunicatorOptions;
