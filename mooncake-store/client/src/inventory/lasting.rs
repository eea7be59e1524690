//! A segment in a file that outlives the process: its objects are announced by the process that comes next.
//!
//! The next process is the same client to the master. It knows what its predecessor knew, from the index beside the file, asks the master for what has changed
//! since, and takes the segment back that the dead process had; then it offers the memory anew, as to a master that was restarted: space is kept, and each object
//! is announced when its bytes are what they were. Writers who still hold a promise of the dead process's find nobody at its addresses.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mooncake_core::fault_injection::is_planted;
use mooncake_core::ids::{ClientId, ReplicaId, SegmentId};
use mooncake_core::memory::{AddressHole, HostMemory, MemorySource, lock_alone};
use mooncake_core::{Error, Result};
use mooncake_transport::Transport;

use super::index::{self, Came, Change, Contents, Found, Header, ITEMS};
use super::{Entry, Inventory};
use crate::deadline::Deadline;
use crate::mount::Mounted;
use crate::{Client, Inner};

/// Addresses of processes before that nothing else may come to lie at.
const PLACES: usize = 8;
/// Changes beyond twice the objects there are, before the index is written anew.
const SPARE: usize = 10_000;

/// A file whose memory is the segment, so that objects in it outlive the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentFile {
    /// The file, on tmpfs or hugetlbfs; made when it is not there. A memfd that was passed on is `/proc/self/fd/<number>`.
    pub path: PathBuf,
    /// Where is written down what lies in it, on a file system that takes writes (hugetlbfs does not).
    pub index: PathBuf,
}

impl SegmentFile {
    /// That file, and its name with `.objects` behind it for the index.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let mut index = path.clone().into_os_string();
        index.push(".objects");
        Self { path, index: index.into() }
    }
}

/// Such a file, taken.
#[derive(Debug)]
pub(crate) struct Opened {
    memory: HostMemory,
    /// Objects of the process before.
    found: Option<Found>,
    /// Where those of processes before lay.
    holes: Vec<AddressHole>,
    header: Header,
    index: PathBuf,
}

impl Opened {
    /// Takes the file; `client` is who we are if nobody had it before.
    ///
    /// # Errors
    /// `FILE_LOCK_FAIL` when another process has it, `INVALID_PARAMS` when it is not such a file, and what the system says, with the path.
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
            return Err(Error::invalid("it is no ordinary file"));
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
                // The file was a segment of this client, and a cache that cannot be read is an empty one.
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
            // Said before the file has a length, so that it is known as ours whatever happens.
            write_anew(&wanted.index, &index::begin(&header))
                .map_err(|error| no_index(&wanted.index, error))?;
        }
        found = found.filter(|found| found.header.len == header.len);
        let holes = header.places.iter().map(|addr| AddressHole::reserve(*addr, header.len));
        let holes = holes.collect::<Result<Vec<_>>>().unwrap_or_else(|error| {
            // A late writer could meet something else there, which has nothing to do with what we find.
            tracing::warn!("addresses of the process before are in use: {error}");
            found = None;
            Vec::new()
        });
        let memory = HostMemory::map_alone(file, len, numa_node)?;
        Ok(Self { memory, found, holes, header, index: wanted.index.clone() })
    }

    /// Who we are.
    pub(crate) fn client(&self) -> ClientId {
        self.header.client
    }
}

/// Writes a file in one piece: it is there wholly or not at all.
fn write_anew(path: &Path, bytes: &[u8]) -> io::Result<File> {
    let mut beside = path.to_owned().into_os_string();
    beside.push(".new");
    let mut file = File::create(&beside)?;
    let written = file.write_all(bytes).and_then(|()| std::fs::rename(&beside, path));
    written.inspect_err(|_| drop(std::fs::remove_file(&beside)))?;
    Ok(file)
}

fn no_index(path: &Path, error: io::Error) -> Error {
    let hint = match error.kind() {
        io::ErrorKind::InvalidInput => {
            "; hugetlbfs takes no writes: give it another place (MOONCAKE_STORE_SEGMENT_INDEX), such as one in /dev/shm"
        }
        _ => "",
    };
    Error::from(error).context(format!("its index {}{hint}", path.display()))
}

/// Writes down what is known. It need not reach a disk: it is to outlive the process, not the machine.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    header: Header,
    file: Option<File>,
    /// Since the last time it was written down.
    went: Vec<u64>,
    offered: Vec<u64>,
    came: Vec<ReplicaId>,
    /// More has changed than can be told one by one.
    anew: bool,
    /// Items in the file.
    items: usize,
}

impl Journal {
    pub(super) fn went(&mut self, segment: SegmentId, offset: u64) {
        if segment == self.header.segment {
            self.went.push(offset);
        }
    }

    pub(super) fn offered(&mut self, segment: SegmentId, offset: u64) {
        if segment == self.header.segment {
            self.offered.push(offset);
        }
    }

    pub(super) fn came(&mut self, replica: ReplicaId) {
        self.came.push(replica);
    }

    pub(super) fn write_anew(&mut self) {
        self.anew = true;
    }

    /// What has changed. The last line says how far it is heard: one that is cut off is of what is asked for again.
    fn append(
        &mut self,
        (epoch, heard): (u64, u64),
        went: &[u64],
        offered: &[u64],
        came: &[Came],
    ) -> io::Result<()> {
        let mut bytes = Vec::new();
        let change =
            Change { epoch, heard, went: went.to_vec(), offered: offered.to_vec(), came: came.to_vec() };
        index::append(&change, &mut bytes);
        self.items += went.len() + offered.len() + came.len();
        self.file.as_mut().map_or(Ok(()), |file| file.write_all(&bytes))
    }

    /// All there is.
    fn rewrite(&mut self, (epoch, heard): (u64, u64), all: &[Came]) -> io::Result<()> {
        let mut bytes = index::begin(&self.header);
        for part in all.chunks(ITEMS) {
            let (went, offered) = (Vec::new(), Vec::new());
            let change = Change { epoch, heard, went, offered, came: part.to_vec() };
            index::append(&change, &mut bytes);
        }
        self.items = all.len();
        self.file = Some(write_anew(&self.path, &bytes)?);
        self.anew = false;
        Ok(())
    }
}

impl Inventory {
    /// Writes down what has changed, if it is to be.
    pub(super) fn note(&mut self) {
        let Some(epoch) = self.epoch else { return };
        let Some(mut journal) = self.journal.take() else { return };
        let came = std::mem::take(&mut journal.came);
        let went = std::mem::take(&mut journal.went);
        let offered = std::mem::take(&mut journal.offered);
        let now = (epoch, self.heard);
        let noted = if journal.anew || journal.items > 2 * (self.entries.len() + self.kept.len()) + SPARE {
            journal.rewrite(now, &self.known(journal.header.segment))
        } else {
            // What came and went meanwhile is not here any more.
            let came = came.iter().filter_map(|id| self.came(*id, journal.header.segment));
            journal.append(now, &went, &offered, &came.collect::<Vec<_>>())
        };
        match noted {
            Ok(()) => self.journal = Some(journal),
            Err(error) => {
                tracing::warn!(index = %journal.path.display(), "objects will not outlive this process: {error}");
                give_up(&journal);
            }
        }
    }

    /// Objects in a segment that are known for sure.
    fn known(&self, segment: SegmentId) -> Vec<Came> {
        let told = self.entries.keys().filter_map(|id| self.came(*id, segment));
        // A later process could not say to which list of which master the others belong.
        let kept = self.kept_in(segment).filter(|entry| !entry.expired);
        let kept = kept.filter_map(|entry| came(ReplicaId(0), entry));
        told.chain(kept).collect()
    }

    fn came(&self, id: ReplicaId, segment: SegmentId) -> Option<Came> {
        let entry = self.entries.get(&id)?;
        if entry.sealed && entry.stored.segment == segment { came(id, entry) } else { None }
    }

    /// The memory is not the file's any more, or its master tells nothing.
    pub(crate) fn end_journal(&mut self) {
        if let Some(journal) = self.journal.take() {
            give_up(&journal);
        }
    }

    /// The segment lies elsewhere from now on.
    pub(crate) fn moved(&mut self, addr: u64) {
        if let Some(journal) = &mut self.journal {
            journal.header.places.push(addr);
            let beyond = journal.header.places.len().saturating_sub(PLACES);
            journal.header.places.drain(..beyond);
            journal.write_anew();
            self.note();
        }
    }

    /// Takes up what a dead process knew.
    fn inherit(&mut self, found: &Found, now: mooncake_core::clock::Moment) {
        (self.epoch, self.heard) = (Some(found.epoch), found.heard);
        for Came { replica, stored, sum, offered } in found.objects.values().cloned() {
            let pinned = now.after(std::time::Duration::from_millis(stored.soft_pin_ms));
            let place = (stored.segment, stored.offset);
            let entry = Entry {
                stored,
                pinned,
                sum: Some(sum),
                sealed: true,
                announced: false,
                offered,
                expired: false,
            };
            if replica == ReplicaId(0) {
                self.kept.insert(place, entry);
            } else {
                self.entries.insert(replica, entry);
            }
        }
    }

    /// All that is known for sure is to be announced, as lying in another segment. What the master was offered and has not told of is none of it.
    fn keep_all(&mut self, segment: SegmentId) {
        let told = std::mem::take(&mut self.entries).into_values().filter(|entry| entry.sealed);
        let kept = std::mem::take(&mut self.kept).into_values().filter(|entry| !entry.offered);
        self.kept = kept
            .chain(told)
            .map(|mut entry| {
                entry.stored.segment = segment;
                ((segment, entry.stored.offset), entry)
            })
            .collect();
        self.unseen.clear();
        self.summed.clear();
    }
}

fn came(replica: ReplicaId, entry: &Entry) -> Option<Came> {
    Some(Came { replica, stored: entry.stored.clone(), sum: entry.sum?, offered: entry.offered })
}

/// Nothing of it is to be believed.
fn give_up(journal: &Journal) {
    let header = Header { segment: SegmentId::default(), ..journal.header.clone() };
    let emptied = write_anew(&journal.path, &index::begin(&header)).map(drop);
    if let Err(error) = emptied.or_else(|_| std::fs::remove_file(&journal.path)) {
        tracing::error!(index = %journal.path.display(), "cannot be emptied; remove it: {error}");
    }
}

impl<T: Transport> Client<T> {
    /// Offers the memory of a file, with the objects that the process before left there.
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

    /// What the process before knew, and what it did not hear any more.
    async fn hear_since(&self, found: &Found, segment: SegmentId, deadline: &Deadline) -> Result<()> {
        let mut inventory = self.inventory.lock().await;
        let now = self.config.clock.now();
        inventory.inherit(found, now);
        let mut lost = false;
        loop {
            let asked = self.master.inventory(self.id, inventory.heard);
            let page = match deadline.bound("asking for the inventory", asked).await {
                Ok(page) => page,
                Err(error) if super::is_refusal(&error) => {
                    super::log_refusal(&error);
                    inventory.reset();
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
            if page.epoch != found.epoch {
                // It was restarted, too: what its predecessor said is all there is to know.
                inventory.turn_over(page.epoch);
                inventory.apply(page, now);
                break;
            }
            lost |= page.lost;
            let whole = page.whole;
            inventory.apply(page, now);
            if whole {
                break;
            }
        }
        if lost {
            // It took us for dead, and dropped what was here.
            inventory.kept.clear();
        }
        inventory.keep_all(segment);
        Ok(())
    }
}
