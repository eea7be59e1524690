//! Owners of disks that are replaced by another process between the loan of a value and its read.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use mooncake_core::ids::{ClientId, Uuid};
use mooncake_core::memory::MemorySource;
use mooncake_store::client::Client;
use mooncake_store::master::{DiskOptions, MasterOptions};
use mooncake_store::protocol::server::{Refusal, RunningServer, Server, ServerOptions, Service};
use mooncake_store::protocol::wire::{OffloadItem, StoredAt};
use parking_lot::Mutex;

use crate::cluster::value;
use crate::common::fake_disk::FakeDisk;
use crate::faults::{Wire, World};
use crate::identity::{LEN, NAME, first, memory, next};

const OWNER: ClientId = ClientId(Uuid { first: 7, second: 7 });

/// Owner of a disk whose response, once it exists, waits for the test.
struct HeldBack {
    disk: Arc<FakeDisk>,
    /// Signals a response that exists, and the permission to send it.
    pause: Mutex<Option<(Sender<()>, Receiver<()>)>>,
}

impl Service for HeldBack {
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        self.disk.call(function, body, out)?;
        if let Some((asked, go)) = self.pause.lock().take() {
            asked.send(()).unwrap();
            go.recv().unwrap();
        }
        Ok(())
    }
}

/// Serves the disk, and makes the master name it for the object "d".
async fn serve(world: &World, owner: Arc<HeldBack>) -> RunningServer {
    let server = Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap();
    let endpoint = server.local_addr().to_string();
    world.master.mount_disk(OWNER, true).unwrap();
    let item = OffloadItem { tenant: "default".into(), key: b"d".to_vec(), size: LEN as i64 };
    let place = StoredAt { bucket: 0, offset: 0, key_size: 1, data_size: LEN as i64, endpoint };
    world.master.offloaded(OWNER, &[item], &[place]).unwrap();
    server.start(owner)
}

async fn get(reader: Client<Wire>) -> Option<Vec<u8>> {
    reader.get("d").await.unwrap().map(Into::into)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_value_that_one_process_lends_is_not_read_from_the_next_one() {
    // The test runs with and without an existing route.
    for known in [true, false] {
        let disks = Some(DiskOptions::default());
        let world = World::new(MasterOptions { disks, ..MasterOptions::default() });
        let memory = memory();
        let before = first(&world, &memory).await;
        let (reader, _) = world.connect(0).await;
        if known {
            assert_eq!(reader.get("k").await.unwrap().unwrap(), value(1, LEN));
        }
        let address = memory.span().addr();
        let disk = Arc::new(FakeDisk {
            value: Mutex::new((address, 1, 60_000)),
            memory: NAME.into(),
            parts: false,
            ranges: false,
            asked: Mutex::default(),
        });
        let ((asked, has_asked), (go, may_go)) = (channel(), channel());
        let owner = HeldBack { disk: disk.clone(), pause: Mutex::new(Some((asked, may_go))) };
        let _server = serve(&world, Arc::new(owner)).await;

        let reading = tokio::spawn(get(reader));
        tokio::task::block_in_place(|| has_asked.recv().unwrap());
        before.die().await;
        let (_after, region) = next(&world, &memory, 0xee).await;
        // The next process lends the value from elsewhere in the same memory.
        let mut all = region.exclusive().unwrap();
        all.copy_from(LEN, &value(2, LEN)).unwrap();
        let _region = all.into_region().unwrap();
        *disk.value.lock() = (address + LEN as u64, 1, 60_000);
        go.send(()).unwrap();

        let got = reading.await.unwrap();
        assert!(
            got.is_none() || got.as_deref() == Some(&value(2, LEN)[..]),
            "bytes of another process were taken for the object"
        );
        assert!(disk.asked.lock().len() > 1, "the value was not requested again");
    }
}
