//! Hot objects: a client reads one key frequently, its owner makes another replica, and reads use
//! both.

use std::collections::BTreeMap;
use std::time::Duration;

use mooncake_store::client::PutOptions;
use mooncake_store::master::{HotOptions, MasterOptions};

use crate::cluster::{Cluster, Kind, eventually, value};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hot_key_is_read_from_two_clients() {
    for kind in [Kind::Embedded, Kind::Tcp] {
        let options = MasterOptions { hot: Some(HotOptions::default()), ..MasterOptions::default() };
        let cluster = Cluster::start(kind, options).await;
        let (a, b) = cluster.pair().await;
        let reader = cluster.builder().segment(0).connect().await.unwrap();
        let config = PutOptions::new().prefer_segment(a.hostname());
        reader.put_with("hot", &value(7, 300_000)[..], &config).await.unwrap();
        eventually("there is a second replica", async || {
            assert!(reader.get("hot").await.unwrap().unwrap() == value(7, 300_000));
            cluster.master.tick();
            tokio::time::sleep(Duration::from_millis(20)).await;
            cluster.master.stats().hot_replicas == 1
        })
        .await;
        let mut firsts = BTreeMap::new();
        for _ in 0..40 {
            let list = reader.replicas().list("hot").await.unwrap().unwrap();
            assert_eq!(list.replicas.len(), 2);
            *firsts.entry(list.replicas[0].location.memory().unwrap().endpoint.clone()).or_insert(0) += 1;
        }
        assert!(firsts.len() == 2 && firsts.values().all(|count| *count >= 5), "{firsts:?}");
        // The first owner leaves, and the copy serves.
        a.close().await.unwrap();
        assert!(reader.get("hot").await.unwrap().unwrap() == value(7, 300_000), "{kind:?}");
        b.close().await.unwrap();
    }
}
