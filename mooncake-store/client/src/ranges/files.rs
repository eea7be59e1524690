//! Parts of objects that are only in a file on a file system shared by all clients.

use mooncake_core::clock::Moment;
use mooncake_core::replica::Replica;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::Transport;

use super::Range;
use crate::deadline::Deadline;
use crate::located::Verdict;
use crate::replicas::in_file;
use crate::state::Inner;

impl<T: Transport> Range<T> {
    fn next_file(&self) -> Option<Replica> {
        let copy = self.response.replica(self.left)?;
        in_file(copy).is_some().then(|| copy.clone())
    }

    /// Records that bytes of a file are returned to the caller, if that is allowed. `number`
    /// identifies the version of the file.
    fn deliver_from_file(&self, copy: &Replica, number: u64, now: Moment) -> Result<()> {
        let location = &self.object.location;
        if copy.id.is_of_one_value() {
            // The file of such a replica belongs to one value, too.
            return location.deliver(&self.response, now);
        }
        let path = in_file(copy).map_or("", |(_, path)| path);
        match location.deliver_from_disk(&self.response, Some(&(path.to_owned(), number)), now)? {
            Verdict::Deliver => Ok(()),
            Verdict::Confirm => Err(Error::from(ErrorCode::LeaseExpired)),
        }
    }
}

impl<T: Transport> Inner<T> {
    /// Reads open ranges whose next replica is in a file. Returns whether there was one.
    pub(super) async fn read_files(&self, ranges: &mut [Range<T>], deadline: &Deadline) -> bool {
        let Some(files) = &self.files else { return false };
        let reads = ranges.iter_mut().filter(|range| range.is_open()).filter_map(|range| {
            let copy = range.next_file()?;
            let mut into = range.into.take()?;
            range.left -= 1;
            Some(async move {
                let (_, path) = in_file(&copy).unwrap_or_default();
                let read = async {
                    let file = files.open(path, range.object.size(), deadline).await?;
                    let part = (range.offset, into.len());
                    files.read(&file, part, deadline, |at, bytes| into.copy_from(at, bytes)).await?;
                    Ok(file.number())
                };
                let result = read.await.inspect_err(|error| files.record_unread(path, error));
                let compared = |number| match self.config.checksum {
                    true => range.compare(&into).map(|()| number),
                    false => Ok(number),
                };
                let result = result.and_then(compared);
                range.into = Some(into);
                let now = self.config.clock.now();
                match result.map(|number| range.deliver_from_file(&copy, number, now)) {
                    Ok(Ok(())) => range.outcome = Some(Ok(())),
                    // The bytes may belong to another value.
                    Ok(Err(error)) => (range.left, range.failure) = (0, Some(error)),
                    Err(error) => range.failure = Some(error),
                }
            })
        });
        !futures::future::join_all(reads).await.is_empty()
    }
}
