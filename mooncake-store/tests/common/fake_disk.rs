//! Fake owner of a disk.

use mooncake_store::protocol::frame::Status;
use mooncake_store::protocol::message::{LendObjects, LendParts, LendRanges, Request};
use mooncake_store::protocol::pack::{self, Answer};
use mooncake_store::protocol::server::{Refusal, Service};
use mooncake_store::protocol::wire::{Lent, LentParts};
use parking_lot::Mutex;

/// Fake owner of a disk, which serves the value that the test chooses.
pub(crate) struct FakeDisk {
    /// Address and version of the value, and the time for which it is lent, in milliseconds.
    pub(crate) value: Mutex<(u64, u64, u64)>,
    /// Endpoint of the memory that holds the values.
    pub(crate) memory: String,
    /// Makes the owner serve parts of values.
    pub(crate) parts: bool,
    /// Makes the owner serve ranges of values, as one of Mooncake C++ 0.3.14 does.
    pub(crate) ranges: bool,
    /// Number of requested keys of each call.
    pub(crate) asked: Mutex<Vec<usize>>,
}

impl FakeDisk {
    fn lend(&self, starts: &[u64]) -> LentParts {
        let (address, version, ttl_ms) = *self.value.lock();
        self.asked.lock().push(starts.len());
        let addresses = starts.iter().map(|start| address + start).collect();
        let lent = Lent { batch: 1, addresses, endpoint: self.memory.clone(), ttl_ms };
        LentParts { lent, versions: vec![version; starts.len()] }
    }
}

impl Service for FakeDisk {
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        if function == LendParts::FUNCTION && self.parts {
            let asked: LendParts<'_> = pack::decode(body).unwrap();
            let answer: Answer<LentParts> = Ok(self.lend(&asked.starts));
            pack::encode(&answer, out);
        } else if function == LendRanges::FUNCTION && self.ranges {
            let request: LendRanges<'_> = pack::decode(body).unwrap();
            let starts: Vec<_> = request.offsets.iter().map(|start| start.cast_unsigned()).collect();
            let answer: Answer<Lent> = Ok(self.lend(&starts).lent);
            pack::encode(&answer, out);
        } else if function == LendObjects::FUNCTION {
            let asked: LendObjects<'_> = pack::decode(body).unwrap();
            let answer: Answer<Lent> = Ok(self.lend(&vec![0; asked.keys.len()]).lent);
            pack::encode(&answer, out);
        } else {
            return Err((Status::NotRegistered, "no such call".into()));
        }
        Ok(())
    }
}
