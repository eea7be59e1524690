//! Client that has been used, and the contents of a scrape.

use std::collections::{BTreeMap, BTreeSet};

use mooncake_store::client::{Client, ClientConfig, ClientPages, Operation, PutOptions, RangeRead};
use mooncake_store::server::MasterServer;

use super::config;

/// Returns the names of all series of a scrape, and the type of each family.
pub(crate) fn scraped(text: &str) -> (BTreeSet<String>, BTreeMap<String, String>) {
    let mut types = BTreeMap::new();
    let mut names = BTreeSet::new();
    for line in text.lines() {
        if let Some(family) = line.strip_prefix("# TYPE ") {
            let (name, kind) = family.split_once(' ').unwrap();
            assert!(types.insert(name.to_owned(), kind.to_owned()).is_none(), "{name} comes twice");
        } else if !line.starts_with('#') {
            names.insert(line.split(['{', ' ']).next().unwrap().to_owned());
        }
    }
    (names, types)
}

/// Starts a client, uses it, and serves its HTTP endpoints.
pub(crate) async fn used_client(settings: ClientConfig) -> (MasterServer, Client, ClientPages) {
    let server = MasterServer::start(config()).await.unwrap();
    let member = Client::builder().config(settings).master(server.addresses().rpc.to_string());
    let client = member.copy_in_process(false).share_memory(false).connect().await.unwrap();
    client.put("k", vec![7; 5000]).await.unwrap();
    client.put("k", vec![7; 5000]).await.unwrap();
    client.put_with("k", vec![8; 300], &PutOptions::new().upsert()).await.unwrap();
    assert_eq!(client.get("k").await.unwrap().unwrap().len(), 300);
    assert_eq!(client.get("none").await.unwrap(), None);
    let outcomes = client.batch_put(&[("a", vec![1; 10]), ("b", vec![])], &PutOptions::default()).await;
    assert!(outcomes.unwrap()[1].is_err(), "an empty value");
    assert_eq!(client.batch_get(&["a", "k", "none"]).await.unwrap().len(), 3);
    let located = client.ranges().locate(&["k", "none"]).await.unwrap().remove(0).unwrap().unwrap();
    let into = client.memory().alloc(100).unwrap().exclusive().unwrap();
    let read = RangeRead { object: located, offset: 200, into };
    client
        .status()
        .counted(client.status().begin(Operation::BatchGetIntoMultiBuffers), client.ranges().read(vec![read]))
        .await;
    let pages = ClientPages::serve(&client, "127.0.0.1", 0).await.unwrap();
    (server, client, pages)
}
