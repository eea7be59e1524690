//! `mooncake p2p`: serves a file to other nodes, reads objects into files, and lists objects.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use mooncake_core::memory::{HostMemory, HostMemoryOptions, MemorySource, lock_alone};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_p2p::{
    GetOptions, GetProgress, ObjectInfo, P2pOptions, P2pStore, RegisterOptions, engine_builder,
};
use mooncake_transport::private_files::{FileMode, Folder, Opening};
use serde_json::json;

use super::args::{P2p, P2pGet, P2pLs, P2pSeed};
use super::interrupt::Interrupt;
use super::output::{human, say, say_json, table};
use super::progress::Progress;
use super::session::Session;

/// Length that every page size of the kernel divides, except those of huge pages.
const MAX_PAGE: u64 = 64 << 10;

pub(super) fn run(session: &Session, task: &P2p) -> Result<()> {
    session.runtime.block_on(async {
        let store = open(session).await?;
        let outcome = match task {
            P2p::Seed(args) => seed(session, &store, args).await,
            P2p::Get(args) => get(session, &store, args).await,
            P2p::Ls(args) => list(session, &store, args).await,
        };
        outcome.and(store.close_with_engine().await)
    })
}

/// Opens a store in the metadata service of `--metadata`.
async fn open(session: &Session) -> Result<P2pStore> {
    let engine = engine_builder(&session.to.hostname, &session.to.metadata).start().await?;
    P2pStore::open(engine, P2pOptions::default()).await.map_err(|error| {
        error.context(format!("cannot use --metadata {}; give etcd://HOST:PORT", session.to.metadata))
    })
}

async fn seed(session: &Session, store: &P2pStore, args: &P2pSeed) -> Result<()> {
    let name = match (&args.name, args.file.file_name().and_then(|name| name.to_str())) {
        (Some(name), _) => name.as_str(),
        (None, Some(name)) => name,
        (None, None) => {
            return Err(Error::invalid(format!(
                "cannot name object: the path has no file name. file={}; give --name",
                args.file.display()
            )));
        }
    };
    let mut interrupt = Interrupt::new()?;
    let register = async {
        let path = args.file.clone();
        let loaded = tokio::task::spawn_blocking(move || load(&path)).await;
        let loaded = loaded.map_err(|error| Error::internal(format!("cannot load file: {error}")))?;
        let memory = loaded.map_err(|error| error.context(args.file.display().to_string()))?;
        let bytes = memory.len() as u64;
        let options = RegisterOptions { max_shard_size: args.shard_size, force_create: args.replace };
        store.register(name, vec![Arc::new(memory)], options).await.map(|()| bytes)
    };
    let bytes = tokio::select! {
        outcome = register => outcome?,
        () = interrupt.wait() => return Ok(()),
    };
    announce(session, store, name, bytes)?;
    interrupt.wait().await;
    Ok(())
}

async fn get(session: &Session, store: &P2pStore, args: &P2pGet) -> Result<()> {
    let mut interrupt = Interrupt::new()?;
    let bytes = tokio::select! {
        outcome = read(store, args) => outcome?,
        () = interrupt.wait() => return Err(interrupted_error(&args.file)),
    };
    if args.serve {
        announce(session, store, &args.name, bytes)?;
        interrupt.wait().await;
        return Ok(());
    }
    match session.to.json {
        true => say_json(&json!({"name": args.name, "bytes": bytes})),
        false => Ok(()),
    }
}

async fn list(session: &Session, store: &P2pStore, args: &P2pLs) -> Result<()> {
    let objects = store.list(&args.prefix).await?;
    if session.to.json {
        let object = |object: &ObjectInfo| json!({"name": object.name, "bytes": object.size, "shard_bytes": object.max_shard_size});
        return say_json(&json!(objects.iter().map(object).collect::<Vec<_>>()));
    }
    let mut rows = vec![["name", "size", "shard size"].map(String::from).to_vec()];
    rows.extend(
        objects
            .iter()
            .map(|object| vec![object.name.clone(), human(object.size), human(object.max_shard_size)]),
    );
    say(table(&rows).trim_end())
}

/// Prints that this process serves an object.
fn announce(session: &Session, store: &P2pStore, name: &str, bytes: u64) -> Result<()> {
    match session.to.json {
        true => say_json(&json!({"name": name, "bytes": bytes, "segment": store.segment_name()})),
        false => say(format_args!("serving {name:?}, {}, until an interrupt", human(bytes))),
    }
}

fn interrupted_error(file: &Path) -> Error {
    let text = format!(
        "cannot read object: interrupted. file={}; the same command continues with the shards that have arrived",
        part_of(file).display()
    );
    Error::new(ErrorCode::UnavailableInCurrentStatus, text)
}

/// Copies a file to shared memory, from which processes of this host read without a socket.
fn load(path: &Path) -> Result<HostMemory> {
    let mut file = File::open(path)?;
    let len = length(file.metadata()?.len())?;
    let memory = shared_memory(len)?;
    let mut target = file_of(&memory)?;
    let copied = std::io::copy(&mut (&mut file).take(len as u64), &mut target)?;
    match copied == len as u64 {
        true => Ok(memory),
        false => Err(Error::invalid("cannot serve file: it became shorter")),
    }
}

fn length(bytes: u64) -> Result<usize> {
    match usize::try_from(bytes) {
        Ok(0) => Err(Error::invalid("cannot serve file: it is empty")),
        Ok(len) => Ok(len),
        Err(_) => Err(Error::invalid(format!("cannot map object: it is too long. bytes={bytes}"))),
    }
}

fn shared_memory(len: usize) -> Result<HostMemory> {
    let options = HostMemoryOptions { shared: Some("mooncake-p2p".into()), ..HostMemoryOptions::default() };
    HostMemory::with(len, &options)
}

/// Returns the file of shared memory.
fn file_of(memory: &HostMemory) -> Result<File> {
    let fd = memory.fd().ok_or_else(|| Error::internal("cannot copy object: its memory has no file"))?;
    Ok(fd.try_clone_to_owned()?.into())
}

/// Range of an object in the file that it is read into.
struct FileRange {
    memory: Arc<HostMemory>,
    start: u64,
    /// True if the memory is that of the file. Other memory is copied to the file at the end.
    is_mapped: bool,
}

fn part_of(file: &Path) -> PathBuf {
    let mut part = file.as_os_str().to_owned();
    part.push(".part");
    part.into()
}

/// Reads an object into a file beside the target, and then renames that file. Returns the length.
async fn read(store: &P2pStore, args: &P2pGet) -> Result<u64> {
    let object = store.find(&args.name).await?.ok_or_else(|| {
        let text = format!("cannot read object: the catalogue does not have it. name={:?}", args.name);
        Error::new(ErrorCode::ObjectNotFound, text)
    })?;
    let part = part_of(&args.file);
    let refuse_part = |error| file_error("write", &part, error);
    // Others may write the folder, and choose what its name leads to.
    let (folder, name) = Folder::around(&part).map_err(refuse_part)?;
    let file = folder.file(name, Opening::Create, FileMode::PRIVATE).map_err(refuse_part)?;
    lock_alone(&file).map_err(|error| error.context(part.display().to_string()))?;
    let can_resume = file.metadata()?.len() == object.size;
    file.set_len(object.size)?;
    let ranges = ranges_of(&file, &object)?;
    let arrived = Arc::new(AtomicU64::new(0));
    let (shown, total, title) = (arrived.clone(), human(object.size), args.name.clone());
    let progress =
        Progress::start_with(move || format!("get {title:?}, {} of {total}", human(shown.load(Relaxed))));
    let on_progress = move |progress: GetProgress| arrived.store(progress.arrived_bytes, Relaxed);
    let resume = can_resume && ranges.iter().all(|range| range.is_mapped);
    let options = GetOptions { resume, on_progress: Some(Arc::new(on_progress)) };
    let memory = ranges.iter().map(|range| range.memory.clone() as Arc<dyn MemorySource>).collect();
    store.get_replica(&args.name, memory, options).await?;
    for range in ranges.iter().filter(|range| !range.is_mapped) {
        let mut target = &file;
        target.seek(SeekFrom::Start(range.start))?;
        let mut source = file_of(&range.memory)?;
        source.rewind()?;
        std::io::copy(&mut source.take(range.memory.len() as u64), &mut target)?;
    }
    file.sync_all()?;
    let file_name = args.file.file_name().ok_or_else(|| std::io::ErrorKind::InvalidInput.into());
    let renamed = file_name.and_then(|target| folder.rename(name, target));
    renamed.map_err(|error| file_error("write", &args.file, error))?;
    progress.end(usize::try_from(object.size).unwrap_or(usize::MAX));
    Ok(object.size)
}

/// Returns memory for the ranges of an object. A range that begins at a page of the file is mapped
/// from the file, so that its bytes outlive this process.
fn ranges_of(file: &File, object: &ObjectInfo) -> Result<Vec<FileRange>> {
    let mut start = 0u64;
    let mut ranges = Vec::with_capacity(object.size_list.len());
    for size in &object.size_list {
        let len = length(*size)?;
        let is_mapped = start.is_multiple_of(MAX_PAGE);
        let memory = if is_mapped { HostMemory::map_filled(file, start, len)? } else { shared_memory(len)? };
        ranges.push(FileRange { memory: Arc::new(memory), start, is_mapped });
        start += size;
    }
    Ok(ranges)
}

fn file_error(what: &str, path: &Path, error: std::io::Error) -> Error {
    Error::invalid(format!("cannot {what} {}: {error}", path.display())).with_source(error)
}
