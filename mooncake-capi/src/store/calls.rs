//! Exported functions. Each converts the arguments from C, and the outcome to a number. A panic
//! becomes a number too.
//!
//! Strings, lists and unregistered memory are used during the call only, and may be freed after it.
//! Codes are those of Mooncake C++, below 0; an argument that must not be NULL and is NULL has the
//! code -1.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::{ptr, slice};

use mooncake_client::{Operation, PutOptions, StoreSetup};
use mooncake_core::replica::{ReplicateConfig, SoftPin};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};

use super::prefix;
use super::stores::{Session, Store};
use super::types::{
    MOONCAKE_STORE_MAX_BATCH, mooncake_prefix_t, mooncake_replicate_config_t, mooncake_store_t,
};
use crate::arguments::{guarded, list, text};

/// Key, and address and length of the memory of its value.
type Item<'a> = (&'a [u8], (u64, usize));

/// Code of a panic.
const PANICKED: i64 = -1;
/// Address of the master for which the program gives none.
const MASTER: &str = "127.0.0.1:50051";

/// Creates a store, to be set up next. Returns NULL on failure; the reason is on standard error.
#[unsafe(no_mangle)]
pub extern "C" fn mooncake_store_create() -> mooncake_store_t {
    guarded("mooncake_store_create", ptr::null_mut(), || Store::create().map(ptr::without_provenance_mut))
}

/// Waits for the calls of other threads, leaves the cluster, and frees the store. Objects in the
/// memory of this client are lost. Registered memory must not be freed before this returns.
#[unsafe(no_mangle)]
pub extern "C" fn mooncake_store_destroy(store: mooncake_store_t) {
    if !store.is_null() {
        guarded("mooncake_store_destroy", (), || Store::destroy(store.addr()));
    }
}

/// Joins a cluster, once per store. Returns 0, or a negative code, after which the call may be
/// repeated. `protocol` and `device_name` may be NULL, for TCP and for all devices. So may
/// `master_server_addr`, for port 50051 of this host.
///
/// # Safety
/// The strings are NULL or end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_setup(
    store: mooncake_store_t,
    local_hostname: *const c_char,
    metadata_server: *const c_char,
    global_segment_size: u64,
    local_buffer_size: u64,
    protocol: *const c_char,
    device_name: *const c_char,
    master_server_addr: *const c_char,
) -> c_int {
    code("mooncake_store_setup", store, |store| {
        // SAFETY: promised by the caller.
        let setup = unsafe {
            StoreSetup {
                local_hostname: text_or(local_hostname, "")?,
                metadata_server: text_or(metadata_server, "")?,
                segment: global_segment_size,
                local_buffer: local_buffer_size,
                protocol: text_or(protocol, "")?,
                devices: text_or(device_name, "")?,
                master: text_or(master_server_addr, MASTER)?,
                tenant: String::new(),
            }
        };
        store.join(setup).map(|()| 0)
    })
}

/// Joins a test cluster on this host: `mooncake_store_setup` with the name `localhost:12345`, the
/// metadata service `127.0.0.1:2379`, and 1 GiB of local buffer.
///
/// # Safety
/// The conditions of `mooncake_store_setup` hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_init_all(
    store: mooncake_store_t,
    protocol: *const c_char,
    device_name: *const c_char,
    mount_segment_size: u64,
) -> c_int {
    code("mooncake_store_init_all", store, |store| {
        // SAFETY: promised by the caller.
        let (protocol, devices) = unsafe { (text_or(protocol, "")?, text_or(device_name, "")?) };
        let setup = StoreSetup {
            local_hostname: "localhost:12345".into(),
            metadata_server: "127.0.0.1:2379".into(),
            segment: mount_segment_size,
            local_buffer: 1 << 30,
            protocol,
            devices,
            master: MASTER.into(),
            tenant: String::new(),
        };
        store.join(setup).map(|()| 0)
    })
}

/// Returns 0 if the master responds, 1 before setup, or 2 if the master does not respond.
#[unsafe(no_mangle)]
pub extern "C" fn mooncake_store_health_check(store: mooncake_store_t) -> c_int {
    code("mooncake_store_health_check", store, |store| {
        let Ok(session) = store.session() else { return Ok(1) };
        let healthy = store.wait(async { Ok(session.client.is_healthy().await) })?;
        Ok(if healthy { 0 } else { 2 })
    })
}

/// Stores a copy of a value under a new key. Returns 0, also if the key exists already (its value
/// does not change), or a negative code.
///
/// # Safety
/// There are `size` readable bytes at `value`. The strings end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_put(
    store: mooncake_store_t,
    key: *const c_char,
    value: *const c_void,
    size: usize,
    config: *const mooncake_replicate_config_t,
) -> c_int {
    code("mooncake_store_put", store, |store| {
        let session = store.session()?;
        // SAFETY: promised by the caller.
        let (key, value, config) = unsafe { (bytes(key)?, memory(value, size)?, options(config)?) };
        store.wait(session.full.put_with(key, value, &PutOptions::from(config))).map(|_| 0)
    })
}

/// Stores a value like `mooncake_store_put`, straight from this memory. Memory that is not
/// registered is accepted where the transport needs no registration, as over TCP. An empty value is
/// refused with -600.
///
/// # Safety
/// There are `size` readable bytes at `buffer`. The strings end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_put_from(
    store: mooncake_store_t,
    key: *const c_char,
    buffer: *mut c_void,
    size: usize,
    config: *const mooncake_replicate_config_t,
) -> c_int {
    code("mooncake_store_put_from", store, |store| {
        let session = store.session()?;
        // SAFETY: promised by the caller.
        let (key, range, config) = unsafe { (bytes(key)?, range(buffer, size)?, options(config)?) };
        // SAFETY: promised by the caller.
        let stored = unsafe { write_from(store, session, Operation::PutFrom, vec![(key, range)], config) }?;
        single(stored).map(|()| 0)
    })
}

/// Stores many values like `mooncake_store_put_from`, and writes a code for each. Returns 0 if all
/// codes have been written, or a negative code. An empty value has the code -600.
///
/// # Safety
/// There are `count` keys, buffers, sizes and results. Each buffer has as many readable bytes as
/// its size says. The strings end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_batch_put_from(
    store: mooncake_store_t,
    keys: *mut *const c_char,
    buffers: *mut *mut c_void,
    sizes: *const usize,
    count: usize,
    config: *const mooncake_replicate_config_t,
    results_out: *mut c_int,
) -> c_int {
    code("mooncake_store_batch_put_from", store, |store| {
        let session = store.session()?;
        // SAFETY: promised by the caller.
        let (items, config) = unsafe { (items(keys, buffers, sizes, count)?, options(config)?) };
        // SAFETY: promised by the caller.
        unsafe {
            let results = results(results_out, count)?;
            let stored = write_from(store, session, Operation::BatchPutFrom, items, config);
            fill("mooncake_store_batch_put_from", results, stored, |()| 0);
        }
        Ok(0)
    })
}

/// Reads a value to the start of this memory. Returns its length in bytes, -704 if the key does not
/// exist, -600 if the memory is too short, or another negative code. Memory that is not registered
/// is accepted as by `mooncake_store_put_from`.
///
/// # Safety
/// There are `size` writable bytes at `buffer`. The key ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_get_into(
    store: mooncake_store_t,
    key: *const c_char,
    buffer: *mut c_void,
    size: usize,
) -> i64 {
    run_call("mooncake_store_get_into", store, |store| {
        let session = store.session()?;
        // SAFETY: promised by the caller.
        let item = unsafe { (bytes(key)?, range(buffer, size)?) };
        // SAFETY: promised by the caller.
        let read = unsafe { read_into(store, session, Operation::GetInto, vec![item]) }?;
        single(read).map(length)
    })
}

/// Reads many values like `mooncake_store_get_into`, and writes a length or code for each. Returns
/// 0 if all of them have been written, or a negative code.
///
/// # Safety
/// There are `count` keys, buffers, sizes and results. Each buffer has as many writable bytes as
/// its size says. The keys end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_batch_get_into(
    store: mooncake_store_t,
    keys: *mut *const c_char,
    buffers: *mut *mut c_void,
    sizes: *const usize,
    count: usize,
    results_out: *mut i64,
) -> c_int {
    code("mooncake_store_batch_get_into", store, |store| {
        let session = store.session()?;
        // SAFETY: promised by the caller.
        unsafe {
            let items = items(keys, buffers, sizes, count)?;
            let results = results(results_out, count)?;
            let read = read_into(store, session, Operation::BatchGetInto, items);
            fill("mooncake_store_batch_get_into", results, read, length);
        }
        Ok(0)
    })
}

/// Returns 1 if the key is readable, 0 if not, or a negative code. A readable key gets a lease,
/// which protects it from eviction.
///
/// # Safety
/// The key ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_is_exist(store: mooncake_store_t, key: *const c_char) -> c_int {
    code("mooncake_store_is_exist", store, |store| {
        // SAFETY: promised by the caller.
        let key = unsafe { bytes(key) }?;
        store.wait(store.session()?.client.exist(key)).map(i64::from)
    })
}

/// Asks for many keys like `mooncake_store_is_exist`, with one request, and writes 1, 0 or a code
/// for each. Returns 0 if all of them have been written, or a negative code.
///
/// # Safety
/// There are `count` keys and results. The keys end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_batch_is_exist(
    store: mooncake_store_t,
    keys: *mut *const c_char,
    count: usize,
    results_out: *mut c_int,
) -> c_int {
    code("mooncake_store_batch_is_exist", store, |store| {
        let session = store.session()?;
        // SAFETY: promised by the caller.
        let (keys, results) = unsafe { (key_list(keys, count)?, results(results_out, count)?) };
        let found = store.wait(session.client.batch_exist(&keys));
        fill("mooncake_store_batch_is_exist", results, found, c_int::from);
        Ok(0)
    })
}

/// Returns the length of a value in bytes, -704 if the key does not exist, or another negative
/// code.
///
/// # Safety
/// The key ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_get_size(store: mooncake_store_t, key: *const c_char) -> i64 {
    run_call("mooncake_store_get_size", store, |store| {
        // SAFETY: promised by the caller.
        let key = unsafe { bytes(key) }?;
        let size = store.wait(store.session()?.client.size(key))?;
        size.map(length).ok_or_else(|| ErrorCode::ObjectNotFound.into())
    })
}

/// Writes the name of this client in the cluster, `host:port`, and a zero byte. The name is empty
/// before setup. Returns 0, or -1 if it does not fit.
///
/// # Safety
/// There are `buf_len` writable bytes at `buf_out`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_get_hostname(
    store: mooncake_store_t,
    buf_out: *mut c_char,
    buf_len: usize,
) -> c_int {
    code("mooncake_store_get_hostname", store, |store| {
        let name = store.session().map_or("", |session| session.client.hostname());
        if buf_out.is_null() || buf_len <= name.len() {
            return Err(Error::internal(format!(
                "cannot write name: buffer is too small. buf_len={buf_len} name={name:?}"
            )));
        }
        // SAFETY: promised by the caller; the name and its zero byte fit.
        unsafe {
            ptr::copy_nonoverlapping(name.as_ptr(), buf_out.cast(), name.len());
            buf_out.add(name.len()).write(0);
        }
        Ok(0)
    })
}

/// Removes a key. Returns 0, -704 if the key does not exist, -706 while a lease protects it, or
/// another negative code. A lease does not protect it if `force` is not 0.
///
/// # Safety
/// The key ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_remove(
    store: mooncake_store_t,
    key: *const c_char,
    force: c_int,
) -> c_int {
    code("mooncake_store_remove", store, |store| {
        // SAFETY: promised by the caller.
        let key = unsafe { bytes(key) }?;
        if store.wait(store.session()?.client.remove(key, force != 0))? {
            return Ok(0);
        }
        Err(ErrorCode::ObjectNotFound.into())
    })
}

/// Removes the keys that a regular expression matches in any part. Returns their number, -600 for
/// an invalid expression, or another negative code. Keys in use stay.
///
/// # Safety
/// The pattern ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_remove_by_regex(
    store: mooncake_store_t,
    pattern: *const c_char,
    force: c_int,
) -> i64 {
    run_call("mooncake_store_remove_by_regex", store, |store| {
        if pattern.is_null() {
            return Err(null("pattern"));
        }
        // SAFETY: promised by the caller.
        let pattern = unsafe { text(pattern) }?;
        store.wait(store.session()?.client.remove_matching(&pattern, force != 0)).map(length)
    })
}

/// Removes every key. Returns their number, or a negative code. Keys in use stay.
#[unsafe(no_mangle)]
pub extern "C" fn mooncake_store_remove_all(store: mooncake_store_t, force: c_int) -> i64 {
    run_call("mooncake_store_remove_all", store, |store| {
        store.wait(store.session()?.client.remove_all(force != 0)).map(length)
    })
}

/// Registers memory, which calls then use without a copy over every transport. It may overlap
/// registered memory; each registration is ended by an unregistration of its own. Returns 0, -1 for
/// no memory, or another negative code.
///
/// # Safety
/// The bytes stay allocated until they are unregistered without an error, or the store is
/// destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_register_buffer(
    store: mooncake_store_t,
    buffer: *mut c_void,
    size: usize,
) -> c_int {
    code("mooncake_store_register_buffer", store, |store| {
        if buffer.is_null() || size == 0 {
            return Err(null("buffer"));
        }
        let session = store.session()?;
        let address = buffer.expose_provenance() as u64;
        // SAFETY: promised by the caller.
        unsafe { session.register(address, size) }.map(|()| 0)
    })
}

/// Unregisters the memory that begins here, after waiting for transfers that use it. Returns 0,
/// -600 if no registered memory begins here, or another negative code.
#[unsafe(no_mangle)]
pub extern "C" fn mooncake_store_unregister_buffer(store: mooncake_store_t, buffer: *mut c_void) -> c_int {
    code("mooncake_store_unregister_buffer", store, |store| {
        store.wait(store.session()?.regions.remove(buffer.addr() as u64)).map(|()| 0)
    })
}

/// Returns how many of the keys from the front are readable, or a negative code. For the keys of
/// the blocks of a prompt, in order, this is the number of blocks that need not be computed. It
/// takes one request. These keys get a lease, and later keys get none.
///
/// The positions of the objects are written to `prefix_out`, unless it is NULL, and freed by
/// `mooncake_store_free_prefix`. After an error NULL is written.
///
/// This function is not in Mooncake C++. A master of Mooncake C++ is asked about all keys, which
/// then get leases.
///
/// # Safety
/// There are `count` keys, which end with a zero byte. `prefix_out` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_find_prefix(
    store: mooncake_store_t,
    keys: *mut *const c_char,
    count: usize,
    prefix_out: *mut *mut mooncake_prefix_t,
) -> i64 {
    if !prefix_out.is_null() {
        // SAFETY: promised by the caller.
        unsafe { prefix_out.write(ptr::null_mut()) };
    }
    run_call("mooncake_store_find_prefix", store, |store| {
        let client = &store.session()?.client;
        // SAFETY: promised by the caller.
        let keys = unsafe { key_list(keys, count) }?;
        if prefix_out.is_null() {
            return store.wait(client.prefix_hits(&keys)).map(|hits| length(hits as u64));
        }
        let lists = store.wait(client.list_prefix(&keys))?;
        // SAFETY: promised by the caller.
        unsafe { prefix_out.write(prefix::into_raw(&lists)) };
        Ok(length(lists.len() as u64))
    })
}

/// Frees a result of `mooncake_store_find_prefix`, also after its store was destroyed. Returns 0,
/// also for NULL, or -600 for any other pointer.
#[unsafe(no_mangle)]
pub extern "C" fn mooncake_store_free_prefix(prefix: *mut mooncake_prefix_t) -> c_int {
    let freed = number("mooncake_store_free_prefix", || {
        if !prefix.is_null() {
            prefix::free(prefix)?;
        }
        Ok(0)
    });
    narrow(freed)
}

/// Writes values from memory of the program. When it returns, nothing uses unregistered memory.
///
/// # Safety
/// The ranges are readable memory until it returns.
unsafe fn write_from(
    store: &Store,
    session: &Session,
    operation: Operation,
    items: Vec<Item<'_>>,
    config: ReplicateConfig,
) -> Result<Vec<Result<()>>> {
    // SAFETY: promised by the caller; registered memory stays until it is unregistered.
    let memory = unsafe { session.call_memory() };
    let values = items.into_iter().map(|(key, range)| (key, memory.pieces([range])));
    let stored = store.wait(session.client.write_valid(operation, values, config));
    memory.wait();
    stored
}

/// Reads values into memory of the program. When it returns, nothing uses unregistered memory.
///
/// # Safety
/// The ranges are writable memory until it returns.
unsafe fn read_into(
    store: &Store,
    session: &Session,
    operation: Operation,
    items: Vec<Item<'_>>,
) -> Result<Vec<Result<u64>>> {
    // SAFETY: promised by the caller; registered memory stays until it is unregistered.
    let memory = unsafe { session.call_memory() };
    let read = store.wait(memory.read_into(operation, items));
    memory.wait();
    read
}

/// Runs a call on a store that returns a number, or the code of its error.
fn run_call(name: &str, store: mooncake_store_t, work: impl FnOnce(&Store) -> Result<i64>) -> i64 {
    number(name, || if store.is_null() { Err(null("store")) } else { Store::call(store.addr(), work) })
}

/// Runs a call like [`run_call`], whose numbers are small.
fn code(name: &str, store: mooncake_store_t, work: impl FnOnce(&Store) -> Result<i64>) -> c_int {
    narrow(run_call(name, store, work))
}

fn number(name: &str, work: impl FnOnce() -> Result<i64>) -> i64 {
    guarded(name, PANICKED, || Ok(work().unwrap_or_else(|error| i64::from(number_of(name, &error)))))
}

fn narrow(number: i64) -> c_int {
    c_int::try_from(number).unwrap_or(c_int::MAX)
}

/// Logs an error, and returns its code. An absent key is an ordinary outcome.
fn number_of(name: &str, error: &Error) -> i32 {
    if error.kind() == ErrorKind::NotFound {
        tracing::debug!(call = name, "{error}");
    } else {
        tracing::warn!(call = name, "{error}");
    }
    error.code().number()
}

/// Writes the result of each item, or the code of the error of all items.
fn fill<T, R: Copy + From<i32>>(
    name: &str,
    results: &mut [MaybeUninit<R>],
    outcomes: Result<Vec<Result<T>>>,
    result: impl Fn(T) -> R,
) {
    match outcomes {
        Ok(outcomes) => {
            for (out, outcome) in results.iter_mut().zip(outcomes) {
                out.write(outcome.map_or_else(|error| number_of(name, &error).into(), &result));
            }
        }
        Err(error) => results.fill(MaybeUninit::new(number_of(name, &error).into())),
    }
}

fn length(len: u64) -> i64 {
    i64::try_from(len).unwrap_or(i64::MAX)
}

fn single<T>(mut outcomes: Vec<Result<T>>) -> Result<T> {
    outcomes.pop().unwrap_or_else(|| Err(Error::internal("a call of one item has no result")))
}

/// Returns the error of a missing argument. Its code is -1, as in Mooncake C++.
fn null(argument: &str) -> Error {
    Error::internal(format!("invalid argument: {argument} is NULL or empty"))
}

/// Returns the string, or `default` for NULL.
///
/// # Safety
/// The pointer is NULL, or the string ends with a zero byte.
unsafe fn text_or(from: *const c_char, default: &str) -> Result<String> {
    if from.is_null() {
        return Ok(default.to_owned());
    }
    // SAFETY: promised by the caller.
    unsafe { text(from) }
}

/// Returns the bytes of a key, which may be any.
///
/// # Safety
/// The pointer is NULL, or the string ends with a zero byte and stays until the result is dropped.
unsafe fn bytes<'a>(key: *const c_char) -> Result<&'a [u8]> {
    if key.is_null() {
        return Err(null("key"));
    }
    // SAFETY: promised by the caller.
    Ok(unsafe { CStr::from_ptr(key) }.to_bytes())
}

/// Returns memory as a slice.
///
/// # Safety
/// There are that many bytes at `from`, which stay until the result is dropped.
unsafe fn memory<'a>(from: *const c_void, len: usize) -> Result<&'a [u8]> {
    if from.is_null() && len > 0 {
        return Err(null("value"));
    }
    // SAFETY: promised by the caller.
    unsafe { list(from.cast(), len) }
}

/// Returns address and length of memory.
fn range(buffer: *mut c_void, len: usize) -> Result<(u64, usize)> {
    if buffer.is_null() && len > 0 {
        return Err(null("buffer"));
    }
    Ok((buffer.expose_provenance() as u64, len))
}

/// Returns a list of the arguments of a batch.
///
/// # Safety
/// There are that many entries at `from`, or it is NULL.
unsafe fn entries<'a, T>(argument: &str, from: *const T, count: usize) -> Result<&'a [T]> {
    if from.is_null() {
        return Err(null(argument));
    }
    if count > MOONCAKE_STORE_MAX_BATCH {
        return Err(Error::invalid(format!(
            "cannot run batch: too many items. count={count} max={MOONCAKE_STORE_MAX_BATCH}"
        )));
    }
    // SAFETY: promised by the caller.
    unsafe { list(from, count) }
}

/// Returns the keys of a batch.
///
/// # Safety
/// There are that many keys at `keys`, or it is NULL. The conditions of [`bytes`] hold for each.
unsafe fn key_list<'a>(keys: *mut *const c_char, count: usize) -> Result<Vec<&'a [u8]>> {
    // SAFETY: promised by the caller.
    unsafe { entries("keys", keys, count)?.iter().map(|key| bytes(*key)).collect() }
}

/// Returns the keys of a batch, and the memory of each.
///
/// # Safety
/// There are that many entries in each list, or it is NULL. The conditions of [`bytes`] hold for
/// each key.
unsafe fn items<'a>(
    keys: *mut *const c_char,
    buffers: *mut *mut c_void,
    sizes: *const usize,
    count: usize,
) -> Result<Vec<Item<'a>>> {
    // SAFETY: promised by the caller.
    let (keys, buffers, sizes) = unsafe {
        (key_list(keys, count)?, entries("buffers", buffers, count)?, entries("sizes", sizes, count)?)
    };
    let memory = buffers.iter().zip(sizes).map(|(buffer, size)| range(*buffer, *size));
    keys.into_iter().zip(memory).map(|(key, memory)| Ok((key, memory?))).collect()
}

/// Returns the results of a batch, to be written.
///
/// # Safety
/// There are that many writable entries at `results`, or it is NULL.
unsafe fn results<'a, T>(results: *mut T, count: usize) -> Result<&'a mut [MaybeUninit<T>]> {
    // SAFETY: checks the list only.
    unsafe { entries("results_out", results.cast_const(), count)? };
    if count == 0 {
        return Ok(&mut []);
    }
    // SAFETY: promised by the caller.
    Ok(unsafe { slice::from_raw_parts_mut(results.cast(), count) })
}

/// Returns the options of a put.
///
/// # Safety
/// The options are NULL, or there are as many segments as they say, which are NULL or end with a
/// zero byte.
unsafe fn options(config: *const mooncake_replicate_config_t) -> Result<ReplicateConfig> {
    if config.is_null() {
        return Ok(ReplicateConfig::default());
    }
    if !config.is_aligned() {
        return Err(Error::invalid("invalid options of a put: the pointer is not aligned"));
    }
    // SAFETY: promised by the caller.
    let config = unsafe { config.read() };
    let mut replication = ReplicateConfig::replicas(config.replica_num as u64);
    if config.with_soft_pin != 0 {
        replication.soft_pin = SoftPin::Enable;
    }
    replication.hard_pin = config.with_hard_pin != 0;
    if !config.preferred_segments.is_null() {
        // SAFETY: promised by the caller.
        let names = unsafe {
            entries("preferred_segments", config.preferred_segments, config.preferred_segments_count)
        }?;
        for name in names.iter().filter(|name| !name.is_null()) {
            // SAFETY: promised by the caller.
            replication.preferred_segments.push(unsafe { text(*name) }?);
        }
    }
    Ok(replication)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_become_numbers() {
        let mut numbers = [7i64; 3];
        // SAFETY: there are three of them.
        let results = unsafe { results(numbers.as_mut_ptr(), 3) }.unwrap();
        let absent = Err(Error::from(ErrorCode::ObjectNotFound));
        fill("test", results, Ok(vec![Ok(5), absent, Ok(u64::MAX)]), length);
        assert_eq!(numbers, [5, -704, i64::MAX]);
        // SAFETY: as above.
        let results = unsafe { super::results(numbers.as_mut_ptr(), 3) }.unwrap();
        fill("test", results, Err::<Vec<Result<u64>>, _>(Error::invalid("all of them")), length);
        assert_eq!(numbers, [-600; 3]);
        assert_eq!((narrow(i64::MAX), narrow(-600)), (c_int::MAX, -600));
        assert_eq!(number("test", || panic!("inside of a call")), PANICKED);
    }

    #[test]
    fn options_are_those_of_the_program() {
        let mut names = [c"a:1".as_ptr(), ptr::null(), c"b:1".as_ptr()];
        let config = mooncake_replicate_config_t {
            replica_num: 2,
            with_soft_pin: 1,
            with_hard_pin: 0,
            preferred_segments: names.as_mut_ptr(),
            preferred_segments_count: names.len(),
        };
        // SAFETY: there are as many names as the options say, where they are read.
        unsafe {
            let read = options(&raw const config).unwrap();
            assert_eq!((read.replicas, read.soft_pin, read.hard_pin), (2, SoftPin::Enable, false));
            assert_eq!(read.preferred_segments, ["a:1", "b:1"]);
            assert_eq!(options(ptr::null()).unwrap(), ReplicateConfig::default());
            let many = mooncake_replicate_config_t { preferred_segments_count: usize::MAX, ..config };
            assert_eq!(options(&raw const many).unwrap_err().code(), ErrorCode::InvalidParams);
        }
    }
}
