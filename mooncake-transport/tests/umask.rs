//! Permissions under every umask, which belongs to the whole process: the only test of its program.
#![cfg(not(miri))]

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use mooncake_transport::private_files::{FileMode, Folder, Opening};
use rustix::fs::Mode;

#[test]
fn the_umask_neither_widens_nor_narrows() {
    let dir = tempfile::tempdir().unwrap();
    for umask in [0, 0o022, 0o027, 0o077, 0o777] {
        let before = rustix::process::umask(Mode::from_raw_mode(umask));
        let own = dir.path().join(format!("own-{umask:o}/below"));
        let folder = Folder::own(&own).unwrap();
        for (name, mode) in [("private", "600"), ("group", "640"), ("writers", "660"), ("all", "644")] {
            let mode: FileMode = mode.parse().unwrap();
            folder.file(name, Opening::Create, mode).unwrap();
            folder.replace(format!("{name}-replaced"), b"value", mode).unwrap();
            folder.create_below(Path::new(&format!("{name}-folder")), mode).unwrap();
            let bits = |name: &str| fs::metadata(own.join(name)).unwrap().mode() & 0o7777;
            assert_eq!(bits(name), mode.bits(), "{name}, umask {umask:o}");
            assert_eq!(bits(&format!("{name}-replaced")), mode.bits(), "{name}, umask {umask:o}");
            assert_eq!(bits(&format!("{name}-folder")), mode.folder_bits(), "{name}, umask {umask:o}");
        }
        rustix::process::umask(before);
        for folder in [&*own, own.parent().unwrap()] {
            assert_eq!(fs::metadata(folder).unwrap().mode() & 0o7777, 0o700, "umask {umask:o}");
        }
    }
}
