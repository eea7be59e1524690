//! The file of a segment that outlives the process.

use std::path::PathBuf;

/// A file whose memory is the segment, so that objects in it outlive the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentFile {
    /// Path of the file, on tmpfs or hugetlbfs. The file is created if it does not exist. The path
    /// of an inherited memfd is `/proc/self/fd/<number>`.
    pub path: PathBuf,
    /// Path of the index of the objects in the file. Its file system must support `write`, which
    /// hugetlbfs does not.
    pub index: PathBuf,
}

impl SegmentFile {
    /// Returns the settings for the file at `path`. The index has the suffix `.objects`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let mut index = path.clone().into_os_string();
        index.push(".objects");
        Self { path, index: index.into() }
    }
}
