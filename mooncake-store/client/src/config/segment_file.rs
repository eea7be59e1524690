//! The file of a segment that outlives the process.

use std::path::PathBuf;

/// A file whose memory is the segment, so that objects in it outlive the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentFile {
    /// The file, on tmpfs or hugetlbfs; made when it is not there. A memfd that was passed on is
    /// `/proc/self/fd/<number>`.
    pub path: PathBuf,
    /// Where is written down what lies in it, on a file system that takes writes (hugetlbfs does
    /// not).
    pub index: PathBuf,
}

impl SegmentFile {
    /// That file, and its name with `.objects` behind it for the index.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let mut index = path.clone().into_os_string();
        index.push(".objects");
        Self { path, index: index.into() }
    }
}
