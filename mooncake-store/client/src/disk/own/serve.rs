//! RPCs that the owner of a disk serves to other clients.

use std::sync::Arc;

use futures::FutureExt;
use mooncake_core::{Error, Result};
use mooncake_transport::Transport;

use super::owner::{Disk, PartToLend};
use super::verify::{VerifiedKeys, VerifyOwn};
use mooncake_protocol::frame::Status;
use mooncake_protocol::message::{
    LendObjects, LendParts, LendRanges, PrefetchObjects, Request, ReturnObjects, VerifyReplicas,
};
use mooncake_protocol::pack::{self, Answer, Pack, Unpack};
use mooncake_protocol::server::{Refusal, Service, Waiting};
use mooncake_protocol::wire::LentParts;

/// RPC service of a disk.
pub(crate) struct DiskService<T: Transport> {
    pub(crate) disk: Arc<Disk<T>>,
    /// Client of the disk, which calls the master.
    pub(crate) client: Arc<dyn VerifyOwn<T>>,
}

impl<T: Transport> Service for DiskService<T> {
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        match function {
            ReturnObjects::FUNCTION => {
                let existed = self.disk.end_loan(read::<ReturnObjects>(body)?.batch);
                pack::encode(&existed, out);
                Ok(())
            }
            PrefetchObjects::FUNCTION => {
                let request = read::<PrefetchObjects<'_>>(body)?;
                pack::encode(&prefetch(&self.disk, &request), out);
                Ok(())
            }
            _ => Err((Status::NotRegistered, "no such call to the owner of a disk".into())),
        }
    }

    fn begin(&self, function: u32, body: &[u8]) -> Option<Waiting> {
        let disk = self.disk.clone();
        match function {
            LendObjects::FUNCTION => {
                let parts_to_lend = read::<LendObjects<'_>>(body).map(|request| objects(&request));
                Some(respond(async move { Ok(lend(&disk, parts_to_lend?).await.map(|parts| parts.lent)) }))
            }
            LendParts::FUNCTION => {
                let parts_to_lend = read::<LendParts<'_>>(body).map(|request| parts(&request));
                Some(respond(async move { Ok(lend(&disk, parts_to_lend?).await) }))
            }
            LendRanges::FUNCTION => {
                let parts_to_lend = read::<LendRanges<'_>>(body).map(|request| ranges(&request));
                Some(respond(async move { Ok(lend(&disk, parts_to_lend?).await.map(|parts| parts.lent)) }))
            }
            VerifyReplicas::FUNCTION => {
                let request = read::<VerifyReplicas<'_>>(body).map(|request| VerifiedKeys::of(&request));
                let client = self.client.clone();
                Some(respond(async move {
                    Ok(match request? {
                        Ok(keys) => client.verify(disk, keys).await,
                        Err(error) => Err(error),
                    })
                }))
            }
            _ => None,
        }
    }
}

async fn lend<T: Transport>(disk: &Disk<T>, parts_to_lend: Result<Vec<PartToLend>>) -> Result<LentParts> {
    disk.lend(parts_to_lend?).await
}

/// Queues objects that are to return to memory. Returns whether they are taken.
fn prefetch<T: Transport>(disk: &Disk<T>, request: &PrefetchObjects<'_>) -> bool {
    let PrefetchObjects { keys, sizes, tenant } = request;
    let objects: Vec<(&[u8], i64)> = keys.iter().copied().zip(sizes.iter().copied()).collect();
    keys.len() == sizes.len() && disk.queue_prefetches(tenant, &objects)
}

/// Encodes the result of a loan as a response.
fn respond<R: Pack + Send>(
    loan: impl Future<Output = Result<Result<R>, Refusal>> + Send + 'static,
) -> Waiting {
    let response = async move {
        let response: Answer<R> = loan.await?.map_err(|error| error.code());
        let mut body = Vec::new();
        pack::encode(&response, &mut body);
        Ok(body)
    };
    response.boxed()
}

fn read<'a, R: Request + Unpack<'a>>(body: &'a [u8]) -> Result<R, Refusal> {
    pack::decode(body).map_err(|error| (Status::InvalidArguments, format!("{}: {error}", R::NAME)))
}

fn objects(request: &LendObjects<'_>) -> Result<Vec<PartToLend>> {
    let LendObjects { keys, sizes } = request;
    if keys.len() != sizes.len() {
        return Err(Error::invalid(format!("{} sizes for {} keys", sizes.len(), keys.len())));
    }
    let parts_to_lend = keys.iter().zip(sizes.iter()).map(|(key, size)| {
        let len = u64::try_from(*size).ok().filter(|len| *len > 0);
        let len = len.ok_or_else(|| Error::invalid(format!("an object of {size} bytes")))?;
        Ok(PartToLend { key: key.to_vec(), size: len, range: 0..len })
    });
    parts_to_lend.collect()
}

fn ranges(request: &LendRanges<'_>) -> Result<Vec<PartToLend>> {
    let LendRanges { keys, offsets, lengths, sizes } = request;
    if [offsets.len(), lengths.len(), sizes.len()] != [keys.len(); 3] {
        return Err(Error::invalid(format!(
            "{} offsets, {} lengths and {} sizes for {} keys",
            offsets.len(),
            lengths.len(),
            sizes.len(),
            keys.len()
        )));
    }
    let parts_to_lend = (0..keys.len()).map(|i| {
        let range = || {
            let (size, start) = (u64::try_from(sizes[i]).ok()?, u64::try_from(offsets[i]).ok()?);
            let end = start.checked_add(u64::try_from(lengths[i]).ok()?)?;
            (start < end && end <= size).then_some((size, start..end))
        };
        let (size, range) = range().ok_or_else(|| {
            Error::invalid(format!("{} bytes from {} of an object of {}", lengths[i], offsets[i], sizes[i]))
        })?;
        Ok(PartToLend { key: keys[i].to_vec(), size, range })
    });
    parts_to_lend.collect()
}

fn parts(request: &LendParts<'_>) -> Result<Vec<PartToLend>> {
    let LendParts { keys, sizes, starts, counts } = request;
    if [sizes.len(), starts.len(), counts.len()] != [keys.len(); 3] {
        return Err(Error::invalid(format!(
            "{} sizes, {} starts and {} counts for {} keys",
            sizes.len(),
            starts.len(),
            counts.len(),
            keys.len()
        )));
    }
    let parts_to_lend = (0..keys.len()).map(|i| {
        let (size, start) = (sizes[i], starts[i]);
        let end = start.checked_add(counts[i]).filter(|end| start < *end && *end <= size);
        let end = end.ok_or_else(|| {
            Error::invalid(format!("{} bytes from {start} of an object of {size}", counts[i]))
        })?;
        Ok(PartToLend { key: keys[i].to_vec(), size, range: start..end })
    });
    parts_to_lend.collect()
}
