//! A segment in a file that outlives the process. The next process announces the objects of the
//! segment.
//!
//! To the master, the next process is the same client. It reads the knowledge of the previous
//! process from the index beside the file. It then requests the later changes from the master, and
//! unmounts the segment of the previous process. Finally it mounts the memory as at a restarted
//! master: the space stays reserved, and each object is announced if its bytes are unchanged.
//! Writers with a grant of the previous process find no memory at its addresses.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::{ClientId, SegmentId};
use mooncake_core::memory::{AddressHole, HostMemory, MemorySource, lock_alone};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::master_client::is_missing_call;
use mooncake_protocol::message::HandOverSegment;
use mooncake_transport::Transport;
use mooncake_transport::private_files::{self, FileMode, Opening};

use crate::announce::log_refusal;
use crate::config::{ClientConfig, SegmentFile};
use crate::deadline::Deadline;
use crate::inventory::index::{self, Contents, Header, Index};
use crate::inventory::journal::{Journal, replace_file};
use crate::mounted::Mounted;
use crate::state::{Client, Inner};

/// A segment file that this process has locked.
#[derive(Debug)]
pub(crate) struct PersistentSegment {
    memory: HostMemory,
    /// Objects of the previous process.
    recovered: Option<Index>,
    /// Reserved addresses of the segment in earlier processes.
    holes: Vec<AddressHole>,
    header: Header,
    index: PathBuf,
}

impl PersistentSegment {
    /// Locks and maps the file. `client` is the identifier of this client if the file is new.
    ///
    /// # Errors
    /// Returns `FILE_LOCK_FAIL` if another process has locked the file, `INVALID_PARAMS` if it is
    /// not a segment file, and `BUFFER_OVERFLOW` if there is less memory than its length. All other
    /// errors are those of the operating system, with codes of files and the path.
    pub(crate) fn open(settings: &SegmentFile, config: &ClientConfig, client: ClientId) -> Result<Self> {
        let path = settings.path.display();
        let len = usize::try_from(config.segment)
            .map_err(|_| Error::invalid("cannot map segment: it exceeds the address space"));
        len.and_then(|len| Self::open_file(settings, len, config, client))
            .map_err(|error| error.context(format!("segment file {path} (MOONCAKE_STORE_SEGMENT_FILE)")))
    }

    fn open_file(
        settings: &SegmentFile,
        len: usize,
        config: &ClientConfig,
        client: ClientId,
    ) -> Result<Self> {
        let file = private_files::open(&settings.path, Opening::Create, FileMode::PRIVATE);
        let file = file.map_err(Error::of_file)?;
        lock_alone(&file)?;
        let metadata = file.metadata().map_err(Error::of_file)?;
        if !metadata.is_file() {
            return Err(Error::new(ErrorCode::FileOpenFail, "not a regular file"));
        }
        config.check_file_memory(&file, len as u64)?;
        let new_header = Header {
            device: metadata.dev(),
            inode: metadata.ino(),
            len: len as u64,
            client,
            segment: SegmentId::default(),
            addresses: Vec::new(),
        };
        let contents = match private_files::read(&settings.index) {
            Ok(bytes) => index::read(&bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Contents::Foreign,
            Err(error) => return Err(Error::of_file(error).context(settings.index.display().to_string())),
        };
        let mut is_owned = metadata.len() == 0;
        let mut recovered = match contents {
            Contents::Valid(found) => Some(found).filter(|found| {
                (found.header.device, found.header.inode) == (new_header.device, new_header.inode)
            }),
            Contents::Unreadable(why) if !is_planted("refuse-unreadable-index") => {
                // The file was a segment of this client, and an unreadable cache counts as an empty
                // cache.
                tracing::warn!(index = %settings.index.display(), "segment file starts empty: {why}");
                is_owned = true;
                None
            }
            Contents::Unreadable(_) | Contents::Foreign => None,
        };
        if recovered.is_none() && !is_owned {
            return Err(Error::invalid(format!(
                "it has {} bytes, and its index {} says nothing of it: remove it, or give another",
                metadata.len(),
                settings.index.display()
            )));
        }
        let header =
            recovered.as_ref().map_or(new_header, |index| Header { len: len as u64, ..index.header.clone() });
        if recovered.is_none() {
            // The index is written before the file gets its length. A crash in between leaves a
            // file that is still known as a segment of this client.
            replace_file(&settings.index, &index::begin(&header))
                .map_err(|error| no_index(&settings.index, error))?;
        }
        recovered = recovered.filter(|index| index.header.len == header.len);
        let holes = header.addresses.iter().map(|addr| AddressHole::reserve(*addr, header.len));
        let holes = holes.collect::<Result<Vec<_>>>().unwrap_or_else(|error| {
            // Other memory lies at the old addresses, and a late writer could reach it. That memory
            // is unrelated to the objects of the segment.
            tracing::warn!("addresses of the process before are in use: {error}");
            recovered = None;
            Vec::new()
        });
        let memory = HostMemory::map_alone(file, len, config.memory.numa_node)?;
        Ok(Self { memory, recovered, holes, header, index: settings.index.clone() })
    }

    /// Returns the identifier of the client that owns the segment.
    pub(crate) fn client(&self) -> ClientId {
        self.header.client
    }
}

fn no_index(path: &Path, error: io::Error) -> Error {
    let hint = match error.kind() {
        io::ErrorKind::InvalidInput => {
            "; hugetlbfs takes no writes: set MOONCAKE_STORE_SEGMENT_INDEX to a path elsewhere, such as /dev/shm"
        }
        _ => "",
    };
    Error::of_file(error).context(format!("its index {}{hint}", path.display()))
}

impl<T: Transport> Client<T> {
    /// Mounts the memory of a file, with the objects that the previous process left there.
    pub(crate) async fn mount_persistent(&self, persistent: PersistentSegment) -> Result<SegmentId> {
        self.inner.usable()?;
        let deadline = self.inner.deadline();
        let id = self.inner.mount_persistent(persistent, &deadline).await?;
        self.start_heartbeat();
        Ok(id)
    }
}

impl<T: Transport> Inner<T> {
    async fn mount_persistent(
        self: &Arc<Self>,
        persistent: PersistentSegment,
        deadline: &Deadline,
    ) -> Result<SegmentId> {
        let PersistentSegment { memory, recovered, holes, mut header, index } = persistent;
        self.exchange_promise(deadline).await?;
        let memory = Arc::new(memory);
        let region = deadline.bound("registering", self.engine.register(memory.clone())).await?;
        let _changing = self.changing(deadline).await?;
        let segment = self.new_segment(&region);
        match &recovered {
            Some(previous) => self.fetch_changes_since(previous, segment.id, deadline).await?,
            None => self.begin_inventory(deadline).await?,
        }
        let previous = std::mem::replace(&mut header.segment, segment.id);
        if previous != SegmentId::default() {
            self.hand_over(previous, deadline).await?;
        }
        {
            let mut inventory = self.inventory.lock().await;
            inventory.journal = Some(Journal {
                path: index,
                header,
                file: None,
                removed: Vec::new(),
                offered: Vec::new(),
                added: Vec::new(),
                needs_rewrite: true,
                items: 0,
            });
            if inventory.epoch.is_none() {
                tracing::warn!("this master keeps no inventories: objects will not outlive this process");
                inventory.end_journal();
            }
            inventory.record_move(memory.span().addr());
            let (retained, segment) = (inventory.retained.len(), segment.id);
            tracing::info!(%segment, objects = retained, "memory of a file is offered");
        }
        holes.into_iter().for_each(|hole| self.reserve_hole(hole));
        let mounted = Mounted { has_retained: true, ..Mounted::new(segment, region, Some(memory)) };
        self.offer_new(mounted, deadline).await
    }

    /// Unmounts the segment of the previous process. The master lists its objects, so that this
    /// process announces only those that it has not removed since.
    async fn hand_over(&self, segment: SegmentId, deadline: &Deadline) -> Result<()> {
        let call = self.master.call(HandOverSegment { segment, client: self.id });
        match deadline.bound("handing over", call).await {
            Err(error) if is_missing_call(&error) => {
                deadline.bound("unmounting", self.master.unmount(self.id, segment)).await
            }
            outcome => outcome,
        }
    }

    /// Takes over the objects of the previous process, and applies the changes that it did not
    /// receive.
    async fn fetch_changes_since(
        &self,
        index: &Index,
        segment: SegmentId,
        deadline: &Deadline,
    ) -> Result<()> {
        let mut inventory = self.inventory.lock().await;
        let now = self.config.clock.now();
        inventory.inherit(index, now);
        let (mut lost, mut has_exchanged) = (false, false);
        loop {
            let call = self.master.inventory(self.id, inventory.last_change);
            let timed = match deadline.bound("asking for the inventory", call).await {
                Ok(timed) => timed,
                Err(error) if is_missing_call(&error) => {
                    log_refusal(&error);
                    inventory.reset();
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
            let page = &timed.page;
            if page.epoch != index.epoch {
                // The master was restarted, too. The reports of its predecessor are all that is
                // known.
                inventory.turn_over(page.epoch);
                inventory.apply(timed, now);
                self.exchange_history(&mut inventory, deadline).await?;
                has_exchanged = true;
                self.fetch_unclaimed(&mut inventory, &[index.header.segment], deadline).await?;
                break;
            }
            lost |= page.lost;
            let whole = page.whole;
            inventory.apply(timed, now);
            if whole {
                break;
            }
        }
        if !has_exchanged && !is_planted("order-not-inherited") {
            // The next master needs the order from this process.
            self.exchange_history(&mut inventory, deadline).await?;
        }
        if lost {
            // This client had expired at the master, which dropped the objects in the segment.
            inventory.retained.clear();
        }
        inventory.retain_all(segment);
        Ok(())
    }
}
