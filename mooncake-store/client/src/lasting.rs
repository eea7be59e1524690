//! A segment in a file that outlives the process. The next process announces the objects of the
//! segment.
//!
//! To the master, the next process is the same client. It reads the knowledge of the previous
//! process from the index beside the file. It then requests the later changes from the master, and
//! unmounts the segment of the previous process. Finally it mounts the memory as at a restarted
//! master: the space stays reserved, and each object is announced if its bytes are unchanged.
//! Writers with a grant of the previous process find no memory at its addresses.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::{ClientId, SegmentId};
use mooncake_core::memory::{AddressHole, HostMemory, MemorySource, lock_alone};
use mooncake_core::{Error, Result};
use mooncake_transport::Transport;

use crate::announce::{is_refusal, log_refusal};
use crate::config::SegmentFile;
use crate::deadline::Deadline;
use crate::inventory::index::{self, Contents, Found, Header};
use crate::inventory::journal::{Journal, write_anew};
use crate::mounted::Mounted;
use crate::state::{Client, Inner};

/// A segment file that this process has locked.
#[derive(Debug)]
pub(crate) struct Opened {
    memory: HostMemory,
    /// Objects of the previous process.
    found: Option<Found>,
    /// Reserved addresses of the segment in earlier processes.
    holes: Vec<AddressHole>,
    header: Header,
    index: PathBuf,
}

impl Opened {
    /// Locks and maps the file. `client` is the identifier of this client if the file is new.
    ///
    /// # Errors
    /// Returns `FILE_LOCK_FAIL` if another process has locked the file, and `INVALID_PARAMS` if it
    /// is not a segment file. All other errors are those of the operating system, with the path.
    pub(crate) fn take(
        wanted: &SegmentFile,
        len: usize,
        numa_node: Option<u32>,
        client: ClientId,
    ) -> Result<Self> {
        let shown = wanted.path.display();
        Self::take_unnamed(wanted, len, numa_node, client)
            .map_err(|error| error.context(format!("segment file {shown}")))
    }

    fn take_unnamed(
        wanted: &SegmentFile,
        len: usize,
        numa_node: Option<u32>,
        client: ClientId,
    ) -> Result<Self> {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&wanted.path)?;
        lock_alone(&file)?;
        let about = file.metadata()?;
        if !about.is_file() {
            return Err(Error::invalid("not a regular file"));
        }
        let fresh = Header {
            device: about.dev(),
            inode: about.ino(),
            len: len as u64,
            client,
            segment: SegmentId::default(),
            places: Vec::new(),
        };
        let contents = match std::fs::read(&wanted.index) {
            Ok(bytes) => index::read(&bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Contents::Foreign,
            Err(error) => return Err(Error::from(error).context(wanted.index.display().to_string())),
        };
        let mut owned = about.len() == 0;
        let mut found = match contents {
            Contents::Known(found) => Some(found)
                .filter(|found| (found.header.device, found.header.inode) == (fresh.device, fresh.inode)),
            Contents::Unreadable(why) if !is_planted("refuse-unreadable-index") => {
                // The file was a segment of this client, and an unreadable cache counts as an empty
                // cache.
                tracing::warn!(index = %wanted.index.display(), "segment file starts empty: {why}");
                owned = true;
                None
            }
            Contents::Unreadable(_) | Contents::Foreign => None,
        };
        if found.is_none() && !owned {
            return Err(Error::invalid(format!(
                "it has {} bytes, and its index {} says nothing of it: remove it, or give another",
                about.len(),
                wanted.index.display()
            )));
        }
        let header = found.as_ref().map_or(fresh, |found| Header { len: len as u64, ..found.header.clone() });
        if found.is_none() {
            // The index is written before the file gets its length. A crash in between leaves a
            // file that is still known as a segment of this client.
            write_anew(&wanted.index, &index::begin(&header))
                .map_err(|error| no_index(&wanted.index, error))?;
        }
        found = found.filter(|found| found.header.len == header.len);
        let holes = header.places.iter().map(|addr| AddressHole::reserve(*addr, header.len));
        let holes = holes.collect::<Result<Vec<_>>>().unwrap_or_else(|error| {
            // Other memory lies at the old addresses, and a late writer could reach it. That memory
            // is unrelated to the objects of the segment.
            tracing::warn!("addresses of the process before are in use: {error}");
            found = None;
            Vec::new()
        });
        let memory = HostMemory::map_alone(file, len, numa_node)?;
        Ok(Self { memory, found, holes, header, index: wanted.index.clone() })
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
    Error::from(error).context(format!("its index {}{hint}", path.display()))
}

impl<T: Transport> Client<T> {
    /// Mounts the memory of a file, with the objects that the previous process left there.
    pub(crate) async fn mount_lasting(&self, opened: Opened) -> Result<SegmentId> {
        self.inner.usable()?;
        let deadline = self.inner.deadline();
        let id = self.inner.mount_lasting(opened, &deadline).await?;
        self.start_heartbeat();
        Ok(id)
    }
}

impl<T: Transport> Inner<T> {
    async fn mount_lasting(self: &Arc<Self>, opened: Opened, deadline: &Deadline) -> Result<SegmentId> {
        let Opened { memory, found, holes, mut header, index } = opened;
        self.exchange_promise(deadline).await?;
        let memory = Arc::new(memory);
        let region = deadline.bound("registering", self.engine.register(memory.clone())).await?;
        let _changing = self.changing(deadline).await?;
        let segment = self.new_segment(&region);
        match &found {
            Some(found) => self.hear_since(found, segment.id, deadline).await?,
            None => self.begin_inventory(deadline).await?,
        }
        let before = std::mem::replace(&mut header.segment, segment.id);
        if before != SegmentId::default() {
            deadline.bound("unmounting", self.master.unmount(self.id, before)).await?;
        }
        {
            let mut inventory = self.inventory.lock().await;
            inventory.journal = Some(Journal {
                path: index,
                header,
                file: None,
                went: Vec::new(),
                offered: Vec::new(),
                came: Vec::new(),
                anew: true,
                items: 0,
            });
            if inventory.epoch.is_none() {
                tracing::warn!("this master keeps no inventories: objects will not outlive this process");
                inventory.end_journal();
            }
            inventory.moved(memory.span().addr());
            let (kept, segment) = (inventory.kept.len(), segment.id);
            tracing::info!(%segment, objects = kept, "memory of a file is offered");
        }
        holes.into_iter().for_each(|hole| self.keep_hole(hole));
        let mounted = Mounted {
            segment,
            region,
            own: Some(memory),
            new: true,
            confirmed: false,
            kept: true,
            leaving: false,
        };
        self.offer_new(mounted, deadline).await
    }

    /// Takes over the objects of the previous process, and applies the changes that it did not
    /// receive.
    async fn hear_since(&self, found: &Found, segment: SegmentId, deadline: &Deadline) -> Result<()> {
        let mut inventory = self.inventory.lock().await;
        let now = self.config.clock.now();
        inventory.inherit(found, now);
        let mut lost = false;
        loop {
            let asked = self.master.inventory(self.id, inventory.heard);
            let timed = match deadline.bound("asking for the inventory", asked).await {
                Ok(timed) => timed,
                Err(error) if is_refusal(&error) => {
                    log_refusal(&error);
                    inventory.reset();
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
            let page = &timed.page;
            if page.epoch != found.epoch {
                // The master was restarted, too. The reports of its predecessor are all that is
                // known.
                inventory.turn_over(page.epoch);
                inventory.apply(timed, now);
                break;
            }
            lost |= page.lost;
            let whole = page.whole;
            inventory.apply(timed, now);
            if whole {
                break;
            }
        }
        if lost {
            // This client had expired at the master, which dropped the objects in the segment.
            inventory.kept.clear();
        }
        inventory.keep_all(segment);
        Ok(())
    }
}
