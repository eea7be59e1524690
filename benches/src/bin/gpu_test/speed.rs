//! Speed of copies beside the copies of the driver.

use std::fmt::Write;
use std::sync::Arc;

use mooncake_core::clock::{Clock, SystemClock};
use mooncake_core::memory::{DeviceDriver, MemorySource, MemorySpan};
use mooncake_core::{Error, Result};
use mooncake_nvlink::testkit::{device, filled};
use mooncake_nvlink::{CudaDriver, NvlinkConfig, NvlinkTransport, Stream};
use mooncake_transport::transfer::{self, Transfer};
use mooncake_transport::{Access, BufferDesc, Region, SegmentDesc, Transport};

use crate::machine::Machine;

/// Measured sizes, from the smallest relevant one.
const SIZES: [usize; 4] = [4 << 20, 16 << 20, 64 << 20, 256 << 20];
/// Number of copies in one submission.
const MANY: usize = 8;
/// Number of copies of each size; the best counts.
const TIMES: usize = 20;

type PartResult = std::result::Result<String, String>;

/// Returns the best of several rates, in GB/s.
fn best(len: usize, mut copy: impl FnMut() -> Result<()>) -> Result<f64> {
    let clock = SystemClock::new();
    let mut best = f64::INFINITY;
    for _ in 0..TIMES {
        let start = clock.now();
        copy()?;
        best = best.min(clock.now().since(start).as_secs_f64());
    }
    Ok(len as f64 / best / 1e9)
}

/// Adds a rate beside that of the driver. On hardware, the rate must reach the given share.
fn row(machine: Machine, text: &mut String, what: &str, ours: f64, theirs: f64, share: f64) -> Result<()> {
    let part = ours / theirs;
    let _ = writeln!(text, "   {what}: {ours:.1} GB/s, the driver {theirs:.1} GB/s ({:.0} %)", part * 100.0);
    if machine.fake.is_none() && part < share {
        return Err(Error::internal(format!(
            "{what}: {:.0} % of the driver, but {:.0} % are required",
            part * 100.0,
            share * 100.0
        )));
    }
    Ok(())
}

/// Measures a transfer between the memory of two devices beside a plain copy of the driver.
pub(crate) fn between_devices(machine: Machine) -> PartResult {
    let mut text = String::new();
    for to in 0..machine.devices.min(2) {
        for len in SIZES.into_iter().filter(|len| *len <= machine.bytes(usize::MAX)) {
            one_size(machine, &mut text, to, len).map_err(|error| format!("{text}{error}"))?;
        }
    }
    Ok(text.trim_end().into())
}

fn one_size(machine: Machine, text: &mut String, to: u32, len: usize) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(Error::from)?;
    let node = NvlinkTransport::start(NvlinkConfig::default(), runtime.handle())?;
    let (from, open) = (filled(&device(0), len, 1), filled(&device(to), len, 0));
    let (from_span, to_span) = (from.span(), open.span());
    let region = Region::register(&node, open, Access::Remote)?;
    let local = Region::register(&node, from, Access::Local)?;
    let mut desc = SegmentDesc::new("speed");
    desc.buffers.push(BufferDesc {
        name: "speed".into(),
        addr: region.addr(),
        length: len as u64,
        ..BufferDesc::default()
    });
    node.describe(&mut desc);
    let peer = runtime.block_on(node.connect(&desc))?;
    let ours = best(len, || {
        let write = [Transfer::new(region.addr(), local.slice(0..len)?)];
        transfer::write(&node, &peer, write, None).wait().0
    })?;
    let stream = Stream::new(&device(0))?;
    let theirs = best(len, || {
        // SAFETY: both are allocated, and have no other user.
        unsafe { stream.copy(from_span, to_span) }?;
        stream.wait()
    })?;
    row(machine, text, &format!("cuda:0 to cuda:{to}, {} MiB", len >> 20), ours, theirs, 0.9)?;
    let ours = best(MANY * len, || {
        let write = || Ok(Transfer::new(region.addr(), local.slice(0..len)?));
        let writes = (0..MANY).map(|_| write()).collect::<Result<Vec<_>>>()?;
        transfer::write(&node, &peer, writes, None).wait().0
    })?;
    let theirs = best(MANY * len, || {
        // SAFETY: both are allocated, and have no other user.
        (0..MANY).try_for_each(|_| unsafe { stream.copy(from_span, to_span) })?;
        stream.wait()
    })?;
    row(machine, text, &format!("{MANY} at a time of {} MiB", len >> 20), ours, theirs, 0.9)
}

/// Measures copies between a device and page-locked memory, as transports through the host make
/// them, beside the copies of the driver.
pub(crate) fn staging(machine: Machine) -> PartResult {
    let mut text = String::new();
    let done = (|| {
        let driver = CudaDriver::serve(None)?;
        let len = machine.bytes(64 << 20);
        // The length of the buffers of transports.
        let chunk = 2 << 20;
        let (there, host) = (filled(&device(0), len, 1), driver.staging(len)?);
        let stream = Stream::new(&device(0))?;
        for (what, from, to) in
            [("device to host", there.span(), host.span()), ("host to device", host.span(), there.span())]
        {
            let ours = best(len, || in_chunks(&driver, from, to, chunk))?;
            let theirs = best(len, || {
                // SAFETY: both are allocated, and have no other user.
                unsafe { stream.copy(from, to) }?;
                stream.wait()
            })?;
            row(machine, &mut text, &format!("{what}, {} MiB", len >> 20), ours, theirs, 0.8)?;
        }
        Ok::<(), Error>(())
    })();
    done.map_err(|error| format!("{text}{error}"))?;
    Ok(text.trim_end().into())
}

fn in_chunks(driver: &Arc<CudaDriver>, from: MemorySpan, to: MemorySpan, chunk: usize) -> Result<()> {
    let part = |span: MemorySpan, at: usize| {
        // SAFETY: `at` is inside the span.
        MemorySpan { ptr: unsafe { span.ptr.add(at) }, len: chunk.min(span.len - at), ..span }
    };
    let pending = (0..from.len).step_by(chunk).map(|at| {
        // SAFETY: both are allocated, have no other user, and the copies are awaited.
        unsafe { driver.copy(part(from, at), part(to, at)) }
    });
    let pending = pending.collect::<Result<Vec<_>>>()?;
    pending.into_iter().try_for_each(|copy| copy.wait())
}
