//! RPCs that the owner of a disk serves to other clients.

use std::sync::Arc;

use futures::FutureExt;
use mooncake_core::{Error, Result};
use mooncake_transport::Transport;

use super::owner::{Disk, Wanted};
use mooncake_protocol::frame::Status;
use mooncake_protocol::message::{LendObjects, LendParts, Request, ReturnObjects};
use mooncake_protocol::pack::{self, Answer, Pack, Unpack};
use mooncake_protocol::server::{Refusal, Service, Waiting};
use mooncake_protocol::wire::LentParts;

/// RPC service of a disk.
#[derive(Debug)]
pub(crate) struct Owner<T: Transport>(pub(crate) Arc<Disk<T>>);

impl<T: Transport> Service for Owner<T> {
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        match function {
            ReturnObjects::FUNCTION => {
                let known = self.0.take_back(read::<ReturnObjects>(body)?.batch);
                pack::encode(&known, out);
                Ok(())
            }
            _ => Err((Status::NotRegistered, "no such call to the owner of a disk".into())),
        }
    }

    fn begin(&self, function: u32, body: &[u8]) -> Option<Waiting> {
        let disk = self.0.clone();
        match function {
            LendObjects::FUNCTION => {
                let wanted = read::<LendObjects<'_>>(body).map(|asked| objects(&asked));
                Some(answered(async move { Ok(lend(&disk, wanted?).await.map(|parts| parts.lent)) }))
            }
            LendParts::FUNCTION => {
                let wanted = read::<LendParts<'_>>(body).map(|asked| parts(&asked));
                Some(answered(async move { Ok(lend(&disk, wanted?).await) }))
            }
            _ => None,
        }
    }
}

async fn lend<T: Transport>(disk: &Disk<T>, wanted: Result<Vec<Wanted>>) -> Result<LentParts> {
    disk.lend(wanted?).await
}

/// Encodes the result of a loan as a response.
fn answered<R: Pack + Send>(
    lent: impl Future<Output = Result<Result<R>, Refusal>> + Send + 'static,
) -> Waiting {
    let answer = async move {
        let answer: Answer<R> = lent.await?.map_err(|error| error.code());
        let mut body = Vec::new();
        pack::encode(&answer, &mut body);
        Ok(body)
    };
    answer.boxed()
}

fn read<'a, R: Request + Unpack<'a>>(body: &'a [u8]) -> Result<R, Refusal> {
    pack::decode(body).map_err(|error| (Status::InvalidArguments, format!("{}: {error}", R::NAME)))
}

fn objects(asked: &LendObjects<'_>) -> Result<Vec<Wanted>> {
    let LendObjects { keys, sizes } = asked;
    if keys.len() != sizes.len() {
        return Err(Error::invalid(format!("{} sizes for {} keys", sizes.len(), keys.len())));
    }
    let wanted = keys.iter().zip(sizes.iter()).map(|(key, size)| {
        let len = u64::try_from(*size).ok().filter(|len| *len > 0);
        let len = len.ok_or_else(|| Error::invalid(format!("an object of {size} bytes")))?;
        Ok(Wanted { key: key.to_vec(), size: len, range: 0..len })
    });
    wanted.collect()
}

fn parts(asked: &LendParts<'_>) -> Result<Vec<Wanted>> {
    let LendParts { keys, sizes, starts, counts } = asked;
    if [sizes.len(), starts.len(), counts.len()] != [keys.len(); 3] {
        return Err(Error::invalid(format!(
            "{} sizes, {} starts and {} counts for {} keys",
            sizes.len(),
            starts.len(),
            counts.len(),
            keys.len()
        )));
    }
    let wanted = (0..keys.len()).map(|i| {
        let (size, start) = (sizes[i], starts[i]);
        let end = start.checked_add(counts[i]).filter(|end| start < *end && *end <= size);
        let end = end.ok_or_else(|| {
            Error::invalid(format!("{} bytes from {start} of an object of {size}", counts[i]))
        })?;
        Ok(Wanted { key: keys[i].to_vec(), size, range: start..end })
    });
    wanted.collect()
}
