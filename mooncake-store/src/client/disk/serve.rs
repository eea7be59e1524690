//! What the owner of a disk answers others.

use std::sync::Arc;

use futures::FutureExt;
use mooncake_core::{Error, Result};
use mooncake_transport::Transport;

use super::owner::Disk;
use crate::protocol::frame::Status;
use crate::protocol::message::{LendObjects, Request, ReturnObjects};
use crate::protocol::pack::{self, Answer, Unpack};
use crate::protocol::server::{Refusal, Service, Waiting};
use crate::protocol::wire::Lent;

/// A disk, as its RPC port serves it.
#[derive(Debug)]
pub(super) struct Owner<T: Transport>(pub(super) Arc<Disk<T>>);

/// An object, and how long the caller believes it to be.
type Wanted = (Vec<u8>, u64);

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
        if function != LendObjects::FUNCTION {
            return None;
        }
        let wanted = read::<LendObjects<'_>>(body).map(|asked| objects(&asked));
        let disk = self.0.clone();
        let answer = async move {
            let outcome = match wanted? {
                Ok(wanted) => disk.lend(wanted).await,
                Err(error) => Err(error),
            };
            let answer: Answer<Lent> = outcome.map_err(|error| error.code());
            let mut body = Vec::new();
            pack::encode(&answer, &mut body);
            Ok(body)
        };
        Some(answer.boxed())
    }
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
        Ok((key.to_vec(), len))
    });
    wanted.collect()
}
