//! Functions about transports, links and devices of an engine.

use std::ffi::{c_char, c_int};
use std::ptr;

use mooncake_core::Error;
use mooncake_engine::transport_set;
use mooncake_transport::statistics::NicLoad;
use serde_json::{Value, json};

use super::calls::code;
use super::engines::Engine;
use super::types::{NIC_NAME_LEN, nic_load_stat, nic_load_stat_t, transfer_engine_t};
use crate::arguments::text;

/// Returns 0 if the engine has a transport of this name. The transport stays usable until the
/// engine is destroyed.
///
/// # Safety
/// `proto` is NULL or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uninstallTransport(engine: transfer_engine_t, proto: *const c_char) -> c_int {
    code("uninstallTransport", || {
        // SAFETY: promised by the caller.
        let name = unsafe { text(proto) }?;
        Engine::find(engine.addr())?.check_transport(&name)
    })
}

/// Removes a segment from the cache of this engine. The next `openSegment` looks the segment up
/// again, and its number stays the same. The descriptor in the metadata service is not changed.
///
/// # Safety
/// The name is NULL or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn removeLocalSegment(engine: transfer_engine_t, segment_name: *const c_char) -> c_int {
    code("removeLocalSegment", || {
        // SAFETY: promised by the caller.
        let name = unsafe { text(segment_name) }?;
        Engine::find(engine.addr())?.forget(&name)
    })
}

/// Writes the transports, the devices near each memory, and the traffic with each peer, as text or,
/// if `json` is not 0, as JSON, and a zero byte. A text that does not fit is cut.
///
/// # Safety
/// There are `buf_len` writable bytes at `buf_out`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn showLinks(
    engine: transfer_engine_t,
    buf_out: *mut c_char,
    buf_len: usize,
    json: c_int,
) -> c_int {
    code("showLinks", || {
        if buf_out.is_null() || buf_len == 0 {
            return Err(Error::invalid(format!(
                "cannot show links: the buffer is NULL or empty. buf_len={buf_len}"
            )));
        }
        let links = links(&*Engine::find(engine.addr())?);
        let shown = if json == 0 { described(&links) } else { links.to_string() };
        let shown = cut(&shown, buf_len - 1);
        // SAFETY: promised by the caller; the text and its zero byte fit.
        unsafe {
            ptr::copy_nonoverlapping(shown.as_ptr(), buf_out.cast(), shown.len());
            buf_out.add(shown.len()).write(0);
        }
        Ok(())
    })
}

/// Writes the loads of the first `*count` RDMA devices, and the number of all devices to `count`.
/// Without RDMA the number is 0.
///
/// # Safety
/// `count` is writable, and there are `*count` writable entries at `stats`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getNicLoadStats(
    engine: transfer_engine_t,
    stats: *mut nic_load_stat_t,
    count: *mut usize,
) -> c_int {
    code("getNicLoadStats", || {
        if stats.is_null() || count.is_null() {
            return Err(Error::invalid("cannot return loads: stats or count is NULL"));
        }
        let loads = Engine::find(engine.addr())?.engine.transport().transport().nic_loads();
        // SAFETY: promised by the caller.
        let capacity = unsafe { count.read() };
        for (at, load) in loads.iter().take(capacity).enumerate() {
            // SAFETY: promised by the caller; the entry is one of the first `capacity`.
            unsafe { stats.add(at).write(stat(load)) };
        }
        // SAFETY: promised by the caller.
        unsafe { count.write(loads.len()) };
        Ok(())
    })
}

/// Opens the segment, so that the first transfer does not connect. There are no devices of EFA to
/// warm up. Returns 0, or a code if the segment cannot be opened.
///
/// # Safety
/// The name is NULL or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warmupEfaSegment(engine: transfer_engine_t, segment_name: *const c_char) -> c_int {
    code("warmupEfaSegment", || {
        // SAFETY: promised by the caller.
        let name = unsafe { text(segment_name) }?;
        Engine::find(engine.addr())?.open(&name, false).map(drop)
    })
}

fn stat(load: &NicLoad) -> nic_load_stat {
    let mut device_name = [0; NIC_NAME_LEN];
    let name = cut(&load.device_name, NIC_NAME_LEN - 1);
    for (to, byte) in device_name.iter_mut().zip(name.bytes()) {
        *to = byte.cast_signed() as c_char;
    }
    nic_load_stat {
        device_name,
        inflight_bytes: load.in_flight_bytes,
        ewma_bandwidth_bps: load.bytes_per_second,
    }
}

/// Returns the longest start of a text with at most this number of bytes.
fn cut(text: &str, bytes: usize) -> &str {
    let end = (0..=bytes.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}

fn links(engine: &Engine) -> Value {
    let engine = &engine.engine;
    let loads = engine.transport().transport().nic_loads();
    let peers = engine.metrics();
    json!({
        "segment": engine.name(),
        "transports": transport_set::served(&engine.descriptor()),
        "topology": engine.topology().to_json(),
        "devices": loads.iter().map(|load| json!({
            "name": load.device_name,
            "inflight_bytes": load.in_flight_bytes,
            "bytes_per_second": load.bytes_per_second,
        })).collect::<Vec<_>>(),
        "links": peers.iter().map(|peer| json!({
            "segment": peer.peer,
            "transport": peer.wire.as_str(),
            "bytes_read": peer.counts.bytes_read,
            "bytes_written": peer.counts.bytes_written,
            "failures": peer.counts.failures,
        })).collect::<Vec<_>>(),
    })
}

/// Returns the same as lines.
fn described(links: &Value) -> String {
    let mut lines = vec![format!("segment {}", shown(&links["segment"]))];
    lines.push(format!("transports {}", list(&links["transports"])));
    for (location, devices) in links["topology"].as_object().into_iter().flatten() {
        let [preferred, others] = [&devices[0], &devices[1]].map(list);
        lines.push(format!("memory {location}: devices [{preferred}], then [{others}]"));
    }
    let rows = |name: &str| links[name].as_array().into_iter().flatten().cloned().collect::<Vec<_>>();
    for device in rows("devices") {
        lines.push(format!(
            "device {}: {} bytes in flight, {} bytes/s",
            shown(&device["name"]),
            device["inflight_bytes"],
            device["bytes_per_second"]
        ));
    }
    for link in rows("links") {
        lines.push(format!(
            "link {} over {}: {} bytes read, {} bytes written, {} failures",
            shown(&link["segment"]),
            shown(&link["transport"]),
            link["bytes_read"],
            link["bytes_written"],
            link["failures"]
        ));
    }
    lines.join("\n") + "\n"
}

fn list(values: &Value) -> String {
    values.as_array().into_iter().flatten().map(shown).collect::<Vec<_>>().join(", ")
}

fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_cut_between_characters() {
        assert_eq!(cut("mlx5_0", 6), "mlx5_0");
        assert_eq!(cut("mlx5_0", 5), "mlx5_");
        assert_eq!(cut("aé", 2), "a");
        let load = NicLoad { device_name: "m".repeat(70), in_flight_bytes: 7, bytes_per_second: 1.5 };
        let stat = stat(&load);
        assert_eq!(stat.device_name[62..], [b'm'.cast_signed() as c_char, 0]);
        assert_eq!((stat.inflight_bytes, stat.ewma_bandwidth_bps), (7, 1.5));
    }

    #[test]
    fn lines_name_everything() {
        let links = json!({
            "segment": "a:1", "transports": ["rdma", "tcp"],
            "topology": {"cpu:0": [["mlx5_0"], ["mlx5_1", "mlx5_2"]]},
            "devices": [{"name": "mlx5_0", "inflight_bytes": 4096, "bytes_per_second": 10.5}],
            "links": [{"segment": "b:2", "transport": "rdma", "bytes_read": 1, "bytes_written": 2, "failures": 0}],
        });
        assert_eq!(
            described(&links),
            "segment a:1\ntransports rdma, tcp\nmemory cpu:0: devices [mlx5_0], then [mlx5_1, mlx5_2]\n\
             device mlx5_0: 4096 bytes in flight, 10.5 bytes/s\n\
             link b:2 over rdma: 1 bytes read, 2 bytes written, 0 failures\n"
        );
    }
}
