//! Store of objects in a file: an allocator for its space, a policy for eviction, and enough
//! information on the disk to recover the objects.

use std::collections::HashMap;
use std::fmt;
use std::hash::BuildHasher;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mooncake_core::alloc::{AllocError, BuiltinAllocator, Extent, SegmentAllocator};
use mooncake_core::evict::{BuiltinPolicy, MergeableOrder};
use mooncake_core::ids::SlotId;
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_transport::region::{Local, Sink, Source};
use mooncake_transport::transfer::{self, Transfer};
use parking_lot::Mutex;
use slab::Slab;
use tracing::{info, warn};

use crate::buffer::Frame;
use crate::config::{DiskConfig, StoreConfig};
use crate::layout::{
    BLOCK, CHUNK, IndexEntry, IndexHeader, MAX_KEY, MAX_VALUE, Record, VERSION, header_len, record_len, sum,
    sums,
};
use crate::recover::{Files, LockedDir, OldIndex, RecoveredObject, Recovery, recover_objects, write_index};
use crate::segment::{DiskSegment, OpenSegment};
use crate::stats::{DiskStats, add};
use crate::transport::{DiskPeer, DiskTransport, Registration};

/// Length above which an index is rewritten, if it is also longer than four times its live entries.
const COMPACT_FROM: u64 = 1 << 20;
/// Maximum length of an index.
const INDEX_LIMIT: u64 = 1 << 40;

/// Store of objects in a directory, which recovers them when it is reopened.
///
/// A put that has returned survives the death of the process. An object that a power failure left
/// incomplete fails its checksum and is a miss. The methods wait for the disk without a deadline of
/// their own. A caller that cannot wait drops the future. That is safe, but an object whose removal
/// was interrupted may be recovered when the store is reopened.
pub struct FileStore<A: SegmentAllocator = BuiltinAllocator, E: MergeableOrder = BuiltinPolicy> {
    transport: DiskTransport,
    peer: DiskPeer,
    data: DiskSegment,
    files: Files,
    store: u128,
    config: StoreConfig<A, E>,
    state: Mutex<StoreState<A, E>>,
    /// Index, shared by puts and held exclusively during a rewrite.
    index: tokio::sync::RwLock<Index>,
    counters: Counters,
    _lock: LockedDir,
}

struct StoreState<A: SegmentAllocator, E> {
    entries: Slab<StoredObject<A>>,
    by_key: HashMap<Arc<[u8]>, SlotId>,
    policy: E,
    space: Arc<Mutex<A>>,
    seq: u64,
    bytes: u64,
    /// Bytes of live index entries.
    live_index_bytes: u64,
    departed: Vec<Arc<[u8]>>,
}

/// Maximum number of keys remembered for [`FileStore::take_departed`].
const DEPARTED: usize = 1 << 20;

struct StoredObject<A: SegmentAllocator> {
    key: Arc<[u8]>,
    seq: u64,
    value_len: u64,
    sums: Arc<[u32]>,
    record: Arc<RecordExtent<A>>,
}

/// Extent that is freed when no operation reads or writes it any more.
struct RecordExtent<A: SegmentAllocator> {
    extent: Extent,
    /// Offset of the value in the file.
    value: u64,
    space: Arc<Mutex<A>>,
}

impl<A: SegmentAllocator> Drop for RecordExtent<A> {
    fn drop(&mut self) {
        self.space.lock().release(self.extent);
    }
}

struct Index {
    segment: DiskSegment,
    end: AtomicU64,
}

/// Buffer of a write to an extent. The extent stays allocated as long as the disk uses the buffer.
struct RecordWrite<A: SegmentAllocator> {
    frame: Frame,
    _record: Arc<RecordExtent<A>>,
}

// SAFETY: guaranteed by the frame inside.
#[allow(unsafe_code)]
unsafe impl<A: SegmentAllocator> Source<DiskTransport> for RecordWrite<A> {
    fn local(&self) -> Local<'_, Registration> {
        Source::<DiskTransport>::local(&self.frame)
    }
}

/// Value under construction, for [`FileStore::put`].
#[derive(Debug)]
pub struct Put {
    key: Arc<[u8]>,
    frame: Frame,
    header: usize,
    len: usize,
}

impl Put {
    /// Returns the key of the object.
    pub fn key(&self) -> &Arc<[u8]> {
        &self.key
    }

    /// Returns the bytes of the value, initially zero.
    pub fn value(&mut self) -> &mut [u8] {
        &mut self.frame[self.header..self.header + self.len]
    }
}

/// Content and statistics of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Number of objects held.
    pub objects: u64,
    /// Bytes of their values.
    pub bytes: u64,
    /// Bytes of the file in use, headers and padding included.
    pub used: u64,
    /// Bytes of the file for objects.
    pub capacity: u64,
    /// Number of objects evicted since the start.
    pub evicted: u64,
    /// Number of objects dropped because their bytes differ from the written ones.
    pub corrupt: u64,
    /// Number of objects dropped because they could not be read.
    pub unreadable: u64,
    /// Number of failed puts.
    pub failed_puts: u64,
    /// Statistics of the disk.
    pub disk: DiskStats,
}

#[derive(Debug, Default)]
struct Counters {
    evicted: AtomicU64,
    corrupt: AtomicU64,
    unreadable: AtomicU64,
    failed_puts: AtomicU64,
}

impl<A: SegmentAllocator, E: MergeableOrder> FileStore<A, E> {
    /// Opens the store in `config.dir`, creates it if it is missing, and recovers its objects.
    /// Blocks while it reads.
    ///
    /// # Errors
    ///
    /// The message says whether the directory cannot be written, belongs to another user, is in use
    /// by another process, or holds a store of another version.
    pub fn open(disk: DiskConfig, config: StoreConfig<A, E>) -> Result<(Self, Recovery)> {
        config.check()?;
        let lock = LockedDir::lock(&config.dir)?;
        Self::open_locked(disk, config, lock)
    }

    /// Opens the store in a directory that is locked already, as [`open`](Self::open) does in
    /// `config.dir`.
    ///
    /// # Errors
    ///
    /// Those of [`open`](Self::open).
    pub fn open_locked(
        disk: DiskConfig,
        mut config: StoreConfig<A, E>,
        lock: LockedDir,
    ) -> Result<(Self, Recovery)> {
        config.check()?;
        config.dir = lock.path().to_owned();
        // The kernel keeps the memory of abandoned writes until it is done with it, so that their
        // extent is not reused too early.
        let transport = DiskTransport::start(DiskConfig { zero_copy: true, ..disk })?;
        let files = Files { dir: config.dir.clone() };
        let mut recovery = Recovery::default();
        let OldIndex { store, last_seq, len: old_len, index_entries } = files.read_index(&mut recovery)?;
        let path = config.data.clone().unwrap_or_else(|| files.objects());
        let data = transport.open(&OpenSegment { path, len: config.capacity, grows: false })?;
        let objects = recover_objects(&transport, &data, store, index_entries, &mut recovery)?;
        let mut state = StoreState {
            entries: Slab::new(),
            by_key: HashMap::new(),
            policy: E::new(1024, &config.eviction),
            space: Arc::new(Mutex::new(A::new(config.capacity, &config.allocator))),
            seq: last_seq,
            bytes: 0,
            live_index_bytes: 0,
            departed: Vec::new(),
        };
        // Newest first, so that the older one is dropped when two claim the same extent; then in
        // the order of their puts.
        let mut recovered: Vec<_> = objects.into_iter().filter_map(|s| state.reserve(s)).collect();
        recovered.reverse();
        recovery.objects = recovered.len() as u64;
        for entry in recovered {
            state.insert(entry);
        }
        recovery.bytes = state.bytes;
        let header = IndexHeader { version: VERSION, store, capacity: config.capacity };
        // Entries that are not in the new index cannot come back, whatever happens to the records.
        // Without space for a new index, the old one stays in use.
        let len = match (write_index(&files, header, state.index_entries()), old_len) {
            (Err(error), Some(len)) if error.kind() == ErrorKind::NoSpace => {
                warn!(%error, "cannot rewrite the index of the disk cache; the old one stays in use");
                len
            }
            (written, _) => written?,
        };
        let segment = open_index(&transport, &files)?;
        let index = tokio::sync::RwLock::new(Index { segment, end: AtomicU64::new(len) });
        report(&files, &recovery);
        let peer = transport.own_peer();
        let (state, counters) = (Mutex::new(state), Counters::default());
        let this = Self { transport, peer, data, files, store, config, state, index, counters, _lock: lock };
        Ok((this, recovery))
    }

    /// Creates the buffer of a value of `len` bytes under `key`.
    ///
    /// # Errors
    ///
    /// Returns `Invalid` if either is empty or too long.
    pub fn value(&self, key: &[u8], len: usize) -> Result<Put> {
        if key.is_empty() || key.len() > MAX_KEY || len == 0 || len as u64 > MAX_VALUE {
            return Err(Error::invalid(format!(
                "cannot store object: key must have 1 to {MAX_KEY} bytes and value 1 to {MAX_VALUE}. key_len={} value_len={len}",
                key.len()
            )));
        }
        // Both fit easily into the address space.
        let header = header_len(key.len(), len as u64) as usize;
        let frame = Frame::new(header + len)?;
        Ok(Put { key: key.into(), frame, header, len })
    }

    /// Writes an object and replaces an older one of its key. Evicts objects if needed.
    ///
    /// # Errors
    ///
    /// Returns `NoSpace` if no space can be freed: the file system is full, or the object is larger
    /// than the store.
    pub async fn put(&self, put: Put) -> Result<()> {
        let outcome = self.write_object(put).await;
        if outcome.is_err() {
            add(&self.counters.failed_puts, 1);
        }
        outcome
    }

    async fn write_object(&self, put: Put) -> Result<()> {
        let Put { key, mut frame, header, len } = put;
        let record = self.allocate_extent(record_len(key.len(), len as u64), header as u64).await?;
        let sums: Arc<[u32]> = sums(&frame[header..header + len]).into();
        let seq = {
            let mut state = self.state.lock();
            state.seq += 1;
            state.seq
        };
        let value_len = len as u64;
        Record { store: self.store, seq, value_len, key: &key, sums: sums.to_vec() }.encode(&mut frame);
        let at = self.data.addr() + record.extent.offset;
        self.write(at, RecordWrite { frame, _record: record.clone() }).await?;
        let entry = StoredObject { key, seq, value_len, sums, record };
        let old = self.append_to_index(entry).await?;
        self.overwrite_records(old.into_iter().collect()).await;
        self.compact_if_needed().await
    }

    /// Allocates an extent, and evicts until one is free.
    async fn allocate_extent(&self, len: u64, header: u64) -> Result<Arc<RecordExtent<A>>> {
        loop {
            let victims = {
                let mut state = self.state.lock();
                let allocation = if state.entries.len() >= self.config.max_objects {
                    Err(AllocError::Full)
                } else {
                    state.space.lock().allocate(len, BLOCK)
                };
                match allocation {
                    Ok(extent) => {
                        let (value, space) = (extent.offset + header, state.space.clone());
                        return Ok(Arc::new(RecordExtent { extent, value, space }));
                    }
                    Err(AllocError::Full) => state.victims(len),
                    Err(other) => return Err(other.into()),
                }
            };
            if victims.is_empty() {
                let text = format!("cannot allocate {len} bytes: no free space, and nothing to evict");
                return Err(Error::new(ErrorCode::NoAvailableHandle, text));
            }
            self.evict(victims).await;
        }
    }

    /// Appends an object to the index and adds it: from here on readers find it. Returns the
    /// entry that it replaces.
    async fn append_to_index(&self, entry: StoredObject<A>) -> Result<Option<StoredObject<A>>> {
        let index = self.index.read().await;
        let mut index_entry = Vec::new();
        entry.index_entry().encode(&mut index_entry);
        let at = index.end.fetch_add(index_entry.len() as u64, Ordering::Relaxed);
        self.write(index.segment.addr() + at, index_entry).await?;
        let mut state = self.state.lock();
        // The put with the later number wins over another put of the key, whichever completes
        // first.
        let current_seq = state.by_key.get(&entry.key).map(|slot| state.entries[slot.index()].seq);
        if current_seq.is_some_and(|current_seq| current_seq > entry.seq) {
            return Ok(Some(entry));
        }
        Ok(state.insert(entry))
    }

    async fn write<B: Source<DiskTransport>>(&self, at: u64, bytes: B) -> Result<()> {
        transfer::write(&self.transport, &self.peer, [Transfer::new(at, bytes)], None).await.0
    }

    /// Makes records unreadable on the disk, then frees their extents. A record that cannot be
    /// overwritten keeps its extent until the store is reopened, so that no stale value is found
    /// under a key that was written again.
    async fn overwrite_records(&self, removed: Vec<StoredObject<A>>) {
        if removed.is_empty() {
            return;
        }
        let blank_write = |entry: &StoredObject<A>| {
            let frame = Frame::new(BLOCK as usize)?;
            let at = self.data.addr() + entry.record.extent.offset;
            Ok(Transfer::new(at, RecordWrite { frame, _record: entry.record.clone() }))
        };
        let writes: Result<Vec<_>> = removed.iter().map(blank_write).collect();
        let results = match writes {
            Ok(writes) => transfer::write(&self.transport, &self.peer, writes, None).results().await.0,
            Err(error) => vec![Err(error)],
        };
        for (at, entry) in removed.into_iter().enumerate() {
            if !matches!(results.get(at), Some(Ok(()))) {
                warn!(offset = entry.record.extent.offset, "cannot remove record; its extent stays unused");
                std::mem::forget(entry.record);
            }
        }
    }

    /// Returns the length of an object's value.
    pub fn value_len(&self, key: &[u8]) -> Option<u64> {
        let state = self.state.lock();
        state.by_key.get(key).map(|slot| state.entries[slot.index()].value_len)
    }

    /// Reads a whole value into a buffer of exactly its length.
    ///
    /// # Errors
    ///
    /// Returns `NotFound` if there is no object. An object that is damaged or cannot be read is
    /// dropped, and the error is `Corrupt` or `Internal` this once.
    pub async fn read<B: Sink<DiskTransport>>(&self, key: &[u8], into: B) -> (Result<()>, B) {
        let len = into.local().span.len as u64;
        let Some(object) = self.find(key) else { return (Err(missing()), into) };
        if object.value_len != len {
            let text =
                format!("cannot read object: value has {} bytes, but the buffer has {len}", object.value_len);
            return (Err(Error::invalid(text)), into);
        }
        self.fetch(key, &object, 0, into).await
    }

    /// Reads a part of a value, and from the file only the chunks that contain it.
    ///
    /// # Errors
    ///
    /// Returns `Invalid` if the part is empty or not inside.
    pub async fn read_part(&self, key: &[u8], range: Range<u64>) -> Result<ValuePart> {
        let object = self.find(key).ok_or_else(missing)?;
        if range.start >= range.end || range.end > object.value_len {
            return Err(Error::invalid(format!(
                "cannot read object: bytes {}..{} are not a part of its {} bytes",
                range.start, range.end, object.value_len
            )));
        }
        let chunk = CHUNK as u64;
        let from = range.start - range.start % chunk;
        let end = range.end.next_multiple_of(chunk).min(object.value_len);
        // The length is at most that of the value, which was once in memory.
        let frame = FrameFront { frame: Frame::new((end - from) as usize)?, len: (end - from) as usize };
        let (result, front) = self.fetch(key, &object, from, frame).await;
        result?;
        let first = (range.start - from) as usize;
        let range = first..first + (range.end - range.start) as usize;
        Ok(ValuePart {
            frame: front.frame,
            range,
            version: self.version(object.seq),
            value_len: object.value_len,
        })
    }

    /// Returns the identity of an object's value: a number of the store, and a number that no other
    /// value of the store has. Both are on the disk, so the next process finds the same.
    pub fn identity(&self, key: &[u8]) -> Option<(u64, u64)> {
        let state = self.state.lock();
        let seq = state.by_key.get(key).map(|slot| state.entries[slot.index()].seq)?;
        Some((self.version(0), seq))
    }

    /// Returns a number that no other value has, of this store or, practically, of any store.
    fn version(&self, seq: u64) -> u64 {
        let [low, high] = [self.store, self.store >> 64].map(|half| half as u64);
        (low ^ high).wrapping_add(seq)
    }

    fn find(&self, key: &[u8]) -> Option<FoundObject<A>> {
        let mut state = self.state.lock();
        let slot = *state.by_key.get(key)?;
        state.policy.touch(slot);
        let StoredObject { seq, value_len, sums, record, .. } = &state.entries[slot.index()];
        Some(FoundObject { seq: *seq, value_len: *value_len, sums: sums.clone(), record: record.clone() })
    }

    /// Reads whole chunks from `from` on and verifies them.
    async fn fetch<B: Sink<DiskTransport>>(
        &self,
        key: &[u8],
        object: &FoundObject<A>,
        from: u64,
        into: B,
    ) -> (Result<()>, B) {
        let at = self.data.addr() + object.record.value + from;
        let read = [Transfer::new(at, into)];
        let (result, [Transfer { buffer: into, .. }]) =
            transfer::read(&self.transport, &self.peer, read, None).await;
        let result = result.and_then(|()| {
            let first = (from / CHUNK as u64) as usize;
            let expected = &object.sums[first..];
            if bytes_of(&into).chunks(CHUNK).zip(expected).all(|(chunk, expected)| sum(chunk) == *expected) {
                return Ok(());
            }
            Err(Error::new(
                ErrorCode::ChecksumMismatch,
                "cannot read object: checksum differs from the written one",
            ))
        });
        if let Err(error) = &result
            && !matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout)
        {
            let corrupt = error.kind() == ErrorKind::Corrupt;
            add(if corrupt { &self.counters.corrupt } else { &self.counters.unreadable }, 1);
            warn!(%error, "unreadable object dropped");
            let removed: Vec<_> = {
                let mut state = self.state.lock();
                let removed: Vec<_> = state.remove_entry(key, Some(object.seq)).into_iter().collect();
                state.record_departed(&removed);
                removed
            };
            self.overwrite_records(removed).await;
        }
        (result, into)
    }

    /// Removes objects. Returns how many there were. They never come back.
    pub async fn remove<K: AsRef<[u8]>>(&self, keys: impl IntoIterator<Item = K>) -> usize {
        let removed: Vec<_> = {
            let mut state = self.state.lock();
            keys.into_iter().filter_map(|key| state.remove_entry(key.as_ref(), None)).collect()
        };
        let count = removed.len();
        self.overwrite_records(removed).await;
        count
    }

    /// Removes the objects whose keys `predicate` selects. Returns how many there were.
    pub async fn remove_where(&self, predicate: impl Fn(&[u8]) -> bool) -> usize {
        let keys: Vec<_> = self.keys().into_iter().filter(|key| predicate(key)).collect();
        self.remove(keys).await
    }

    /// Evicts down to the low watermark if the store is filled above the high one. Returns the
    /// number of evicted objects.
    pub async fn trim(&self) -> usize {
        let removed = {
            let mut state = self.state.lock();
            let (used, capacity) = state.usage();
            if used <= capacity * self.config.high_watermark {
                return 0;
            }
            state.victims((used - capacity * self.config.low_watermark) as u64)
        };
        let count = removed.len();
        self.evict(removed).await;
        count
    }

    async fn evict(&self, removed: Vec<StoredObject<A>>) {
        add(&self.counters.evicted, removed.len() as u64);
        self.state.lock().record_departed(&removed);
        self.overwrite_records(removed).await;
    }

    /// Returns the keys that were evicted, damaged or unreadable since the last call, and were not
    /// stored again.
    pub fn take_departed(&self) -> Vec<Arc<[u8]>> {
        let mut state = self.state.lock();
        let mut departed = std::mem::take(&mut state.departed);
        departed.retain(|key| !state.by_key.contains_key(key));
        departed
    }

    /// Returns every key, in no order.
    pub fn keys(&self) -> Vec<Arc<[u8]>> {
        self.state.lock().by_key.keys().cloned().collect()
    }

    /// Returns every key with the length of its value, in no order.
    pub fn listing(&self) -> Vec<(Arc<[u8]>, u64)> {
        self.state.lock().entries.iter().map(|(_, entry)| (entry.key.clone(), entry.value_len)).collect()
    }

    /// Returns whether the store has an object.
    pub fn contains(&self, key: &[u8]) -> bool {
        self.state.lock().by_key.contains_key(key)
    }

    /// Returns the content and statistics of the store.
    pub fn stats(&self) -> StoreStats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let state = self.state.lock();
        let space = state.space.lock();
        StoreStats {
            objects: state.entries.len() as u64,
            bytes: state.bytes,
            used: space.used(),
            capacity: space.capacity(),
            evicted: of(&self.counters.evicted),
            corrupt: of(&self.counters.corrupt),
            unreadable: of(&self.counters.unreadable),
            failed_puts: of(&self.counters.failed_puts),
            disk: self.transport.stats(),
        }
    }

    /// Returns the time for which requests to the disk have been pending without a completion.
    pub fn stalled_for(&self) -> Duration {
        self.transport.stalled_for()
    }

    /// Reads a block of the file, and returns when the disk has answered, with any result.
    pub async fn probe(&self) {
        if let Ok(frame) = Frame::new(BLOCK as usize) {
            let read = [Transfer::new(self.data.addr(), frame)];
            let _ = transfer::read(&self.transport, &self.peer, read, None).await;
        }
    }

    /// Returns the transport of the store.
    pub fn transport(&self) -> &DiskTransport {
        &self.transport
    }

    async fn compact_if_needed(&self) -> Result<()> {
        let needs_compaction = |end: u64| {
            let live = self.state.lock().live_index_bytes;
            end > COMPACT_FROM && end > 4 * live
        };
        if !needs_compaction(self.index.read().await.end.load(Ordering::Relaxed)) {
            return Ok(());
        }
        let mut index = self.index.write().await;
        if !needs_compaction(index.end.load(Ordering::Relaxed)) {
            return Ok(());
        }
        let state = self.state.lock();
        let header = IndexHeader { version: VERSION, store: self.store, capacity: self.config.capacity };
        // The old index stays in use when this fails, and grows.
        let written = write_index(&self.files, header, state.index_entries());
        drop(state);
        match written.and_then(|len| Ok((len, open_index(&self.transport, &self.files)?))) {
            Ok((len, segment)) => *index = Index { segment, end: AtomicU64::new(len) },
            Err(error) => warn!(%error, "cannot rewrite the index"),
        }
        Ok(())
    }
}

struct FoundObject<A: SegmentAllocator> {
    seq: u64,
    value_len: u64,
    sums: Arc<[u32]>,
    record: Arc<RecordExtent<A>>,
}

/// Part of a value, from [`FileStore::read_part`].
#[derive(Debug)]
pub struct ValuePart {
    frame: Frame,
    range: Range<usize>,
    version: u64,
    value_len: u64,
}

impl ValuePart {
    /// Returns the version of the value: parts with the same number belong to the same value, and a
    /// replacement has another number.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns the length of the whole value.
    pub fn value_len(&self) -> u64 {
        self.value_len
    }
}

impl std::ops::Deref for ValuePart {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.frame[self.range.clone()]
    }
}

/// Front of a frame.
struct FrameFront {
    frame: Frame,
    len: usize,
}

// SAFETY: guaranteed by the frame inside: `len` is at most the length of the frame.
#[allow(unsafe_code)]
unsafe impl Source<DiskTransport> for FrameFront {
    fn local(&self) -> Local<'_, Registration> {
        let mut local = Source::<DiskTransport>::local(&self.frame);
        local.span.len = self.len;
        local
    }
}

// SAFETY: guaranteed by the frame inside.
#[allow(unsafe_code)]
unsafe impl Sink<DiskTransport> for FrameFront {}

#[allow(unsafe_code)]
fn bytes_of<B: Sink<DiskTransport>>(sink: &B) -> &[u8] {
    let span = sink.local().span;
    // SAFETY: the holder of a sink is the only user of its bytes, and the sink is borrowed here
    // while they are read.
    unsafe { std::slice::from_raw_parts(span.ptr.as_ptr(), span.len) }
}

impl<A: SegmentAllocator> StoredObject<A> {
    fn index_entry(&self) -> IndexEntry<'_> {
        IndexEntry {
            seq: self.seq,
            offset: self.record.extent.offset,
            value_len: self.value_len,
            key: &self.key,
        }
    }
}

impl<A: SegmentAllocator, E: MergeableOrder> StoreState<A, E> {
    /// Allocates the extent of a recovered object. Returns `None` if a newer one has it, or if it
    /// lies outside.
    fn reserve(&self, recovered: RecoveredObject) -> Option<StoredObject<A>> {
        let RecoveredObject { key, seq, offset, value_len, sums } = recovered;
        let extent = Extent { offset, len: record_len(key.len(), value_len) };
        self.space.lock().reserve(extent).ok()?;
        let value = offset + header_len(key.len(), value_len);
        let record = Arc::new(RecordExtent { extent, value, space: self.space.clone() });
        Some(StoredObject { key: key.into(), seq, value_len, sums: sums.into(), record })
    }

    fn insert(&mut self, entry: StoredObject<A>) -> Option<StoredObject<A>> {
        let old = self.remove_entry(&entry.key.clone(), None);
        let (key, len, index_entry) =
            (entry.key.clone(), entry.value_len, entry.index_entry().encoded_len() as u64);
        let bytes = entry.record.extent.len;
        // A slab of more than 2^32 entries would not fit into memory.
        let slot = SlotId(u32::try_from(self.entries.insert(entry)).unwrap_or(u32::MAX));
        // A policy recognises an object that returns after its eviction by the hash.
        let hash = self.by_key.hasher().hash_one(&key);
        self.by_key.insert(key, slot);
        self.policy.insert_hashed(slot, bytes, hash);
        self.bytes += len;
        self.live_index_bytes += index_entry;
        old
    }

    /// Removes an entry, if it still belongs to this put.
    fn remove_entry(&mut self, key: &[u8], seq: Option<u64>) -> Option<StoredObject<A>> {
        let slot = *self.by_key.get(key)?;
        if seq.is_some_and(|seq| self.entries[slot.index()].seq != seq) {
            return None;
        }
        self.policy.remove(slot);
        Some(self.remove_slot(slot))
    }

    fn remove_slot(&mut self, slot: SlotId) -> StoredObject<A> {
        let entry = self.entries.remove(slot.index());
        self.by_key.remove(&entry.key);
        self.bytes -= entry.value_len;
        self.live_index_bytes -= entry.index_entry().encoded_len() as u64;
        entry
    }

    /// Removes the entries to evict first, for `bytes` bytes of the file.
    fn victims(&mut self, bytes: u64) -> Vec<StoredObject<A>> {
        let (mut removed, mut freed) = (Vec::new(), 0);
        while freed < bytes {
            let Some(slot) = self.policy.evict(&mut |_| true) else { break };
            let entry = self.remove_slot(slot);
            freed += entry.record.extent.len;
            removed.push(entry);
        }
        removed
    }

    /// Records the keys of evicted entries for [`FileStore::take_departed`].
    fn record_departed(&mut self, removed: &[StoredObject<A>]) {
        let remaining = DEPARTED.saturating_sub(self.departed.len());
        self.departed.extend(removed.iter().take(remaining).map(|entry| entry.key.clone()));
    }

    /// Returns the used bytes and the capacity.
    fn usage(&self) -> (f64, f64) {
        let space = self.space.lock();
        (space.used() as f64, space.capacity() as f64)
    }

    fn index_entries(&self) -> impl Iterator<Item = IndexEntry<'_>> {
        self.entries.iter().map(|(_, entry)| entry.index_entry())
    }
}

impl<A: SegmentAllocator, E: MergeableOrder> fmt::Debug for FileStore<A, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileStore").field("dir", &self.files.dir).finish_non_exhaustive()
    }
}

fn open_index(transport: &DiskTransport, files: &Files) -> Result<DiskSegment> {
    transport.open(&OpenSegment { path: files.index(), len: INDEX_LIMIT, grows: true })
}

fn report(files: &Files, recovery: &Recovery) {
    let dir = files.dir.display();
    if recovery.index_lost {
        warn!(%dir, "index of the disk cache is damaged; the cache is empty");
    }
    if let Some(version) = recovery.other_version {
        warn!(%dir, version, known = VERSION, "disk cache has another layout version; the cache is empty");
    }
    info!(%dir, objects = recovery.objects, bytes = recovery.bytes, dropped = recovery.dropped, "disk cache opened");
}

fn missing() -> Error {
    Error::new(ErrorCode::ObjectNotFound, "no such object on this disk")
}
