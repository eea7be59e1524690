//! Metrics of a client's disk.

use mooncake_protocol::metrics::Page;

use crate::disk::DiskReport;

/// Adds the metrics of the disk to a page. Requests and bytes are those of the kernel, as in
/// Mooncake C++.
pub(super) fn show(report: &DiskReport, page: &mut Page) {
    let (store, io) = (&report.store, &report.store.disk);
    let sum = |a: u64, b: u64| a.saturating_add(b);
    for (name, help, value) in [
        ("mooncake_ssd_read_bytes_total", "Bytes read from the disk", io.read_bytes),
        ("mooncake_ssd_write_bytes_total", "Bytes written to the disk", io.written_bytes),
        (
            "mooncake_ssd_total_bytes_total",
            "Bytes read from and written to the disk",
            sum(io.read_bytes, io.written_bytes),
        ),
        ("mooncake_ssd_read_ops_total", "Reads of the disk", io.reads),
        ("mooncake_ssd_write_ops_total", "Writes of the disk", io.writes),
        ("mooncake_ssd_total_ops_total", "Reads and writes of the disk", sum(io.reads, io.writes)),
        ("mooncake_client_disk_read_errors_total", "Failed reads of the disk", io.read_errors),
        ("mooncake_client_disk_write_errors_total", "Failed writes of the disk", io.write_errors),
        ("mooncake_client_disk_no_space_total", "Writes that failed because the disk was full", io.no_space),
        ("mooncake_client_disk_offloaded_total", "Objects offloaded to the disk", report.offloaded),
        ("mooncake_client_disk_refused_total", "Objects that could not be offloaded", report.refused),
        ("mooncake_client_disk_promoted_total", "Objects promoted to memory", report.promoted),
        ("mooncake_client_disk_served_total", "Objects and parts read for other nodes", report.read),
        (
            "mooncake_client_disk_unserved_total",
            "Requested objects and parts that could not be read",
            report.unread,
        ),
        ("mooncake_client_disk_evicted_total", "Objects evicted from the disk", store.evicted),
        (
            "mooncake_client_disk_corrupt_total",
            "Objects dropped because their checksum did not match",
            store.corrupt,
        ),
        (
            "mooncake_client_disk_unreadable_total",
            "Objects dropped because the disk failed",
            store.unreadable,
        ),
    ] {
        page.counter(name, help, value);
    }
    page.gauge("mooncake_client_disk_objects", "Objects on the disk", store.objects);
    page.gauge("mooncake_client_disk_used_bytes", "Used bytes of the disk", store.used);
    page.gauge("mooncake_client_disk_capacity_bytes", "Capacity of the disk in bytes", store.capacity);
    page.gauge("mooncake_client_disk_lent_bytes", "Bytes lent to readers of the disk", report.lent_bytes);
}
