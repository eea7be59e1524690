//! Files of other processes that this process has mapped.

use std::collections::VecDeque;
use std::sync::Arc;

use mooncake_core::{Error, Result};
use parking_lot::Mutex;

use super::file::{FileAddress, SharedFile};

/// Largest number of files that stay mapped without a user.
const MAX_FILES: usize = 128;

/// Mapped files, the one used last at the end.
#[derive(Default)]
pub(crate) struct Mappings {
    files: Mutex<VecDeque<(FileAddress, Arc<SharedFile>)>>,
}

impl Mappings {
    /// Returns the file at an address. The mapping lives as long as the result, also if the other
    /// process ends.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the address does not lead to such a file.
    pub(crate) fn open(&self, address: FileAddress) -> Result<Arc<SharedFile>> {
        if address == FileAddress::NONE {
            return Err(Error::invalid("cannot open shared file: it has no address"));
        }
        let mut files = self.files.lock();
        let known = files.iter().position(|(known, _)| *known == address).and_then(|at| files.remove(at));
        let file = match known {
            Some((_, file)) if file.is_at(address) => file,
            _ => Arc::new(SharedFile::open_whole(address)?),
        };
        if files.len() >= MAX_FILES {
            files.pop_front();
        }
        files.push_back((address, file.clone()));
        Ok(file)
    }

    /// Drops the files that have ended.
    pub(crate) fn trim(&self) {
        self.files.lock().retain(|(address, file)| file.is_at(*address));
    }

    /// Drops all files. Those in use are mapped again.
    pub(crate) fn clear(&self) {
        self.files.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use mooncake_core::memory::{HostMemory, HostMemoryOptions};

    use super::super::file::NAME;
    use super::*;

    #[test]
    fn a_file_stays_mapped_until_it_ends() {
        let options = HostMemoryOptions { shared: Some(NAME.into()), ..HostMemoryOptions::default() };
        let memory = HostMemory::with(8192, &options).unwrap();
        let (address, mappings) = (FileAddress::publish(&memory), Mappings::default());
        let file = mappings.open(address).unwrap();
        mappings.trim();
        assert!(Arc::ptr_eq(&file, &mappings.open(address).unwrap()) && file.len() == 8192);
        let wrong = FileAddress { secret: address.secret ^ 2, ..address };
        assert!(mappings.open(wrong).is_err() && mappings.open(FileAddress::NONE).is_err());
        FileAddress::withdraw(&memory);
        mappings.trim();
        assert!(mappings.files.lock().is_empty() && mappings.open(address).is_err());
    }
}
