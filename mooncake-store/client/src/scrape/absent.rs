//! Client without a disk, for a build without feature `disk`.

use mooncake_protocol::metrics::Families;

use crate::disk::DiskReport;

pub(super) fn add(_: &mut Families, report: &DiskReport) {
    match *report {}
}
