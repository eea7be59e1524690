//! Client without a disk, for a build without feature `disk`.

use mooncake_protocol::metrics::Page;

use crate::disk::DiskReport;

pub(super) fn show(report: &DiskReport, _: &mut Page) {
    match *report {}
}
