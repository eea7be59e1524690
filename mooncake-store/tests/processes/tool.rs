//! `mooncake` as a process, beside a master and a client of the test.

use std::io::Write;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use mooncake_core::fault_injection::VARIABLE;
use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::Segment;
use mooncake_store::client::Client;
use mooncake_store::config::{EventsConfig, MasterConfig};
use mooncake_store::master::{MasterOptions, TenantQuota};
use mooncake_store::protocol::frame;
use mooncake_store::protocol::pack::{self, Answer};
use mooncake_store::server::MasterServer;
use serde_json::{Value, json};

use crate::process::deadline;

struct Cluster {
    master: MasterServer,
    client: Client,
}

impl Cluster {
    async fn start(options: MasterOptions) -> Self {
        Self::with_events(options, None).await
    }

    async fn with_events(options: MasterOptions, events: Option<EventsConfig>) -> Self {
        let config = MasterConfig {
            rpc_address: "127.0.0.1".into(),
            rpc_port: 0,
            metrics_host: "127.0.0.1".into(),
            metrics_port: 0,
            options,
            events,
            ..MasterConfig::default()
        };
        let master = MasterServer::start(config).await.unwrap();
        let client = Client::builder()
            .master(master.addresses().rpc.to_string())
            .advertise(std::net::Ipv4Addr::LOCALHOST.into())
            .segment(8 << 20)
            .connect()
            .await
            .unwrap();
        Self { master, client }
    }

    fn rpc(&self) -> String {
        self.master.addresses().rpc.to_string()
    }

    fn admin(&self) -> String {
        self.master.addresses().admin.unwrap().to_string()
    }

    /// Runs the tool with this input. Returns its output.
    fn tool(&self, arguments: &[&str], input: &[u8]) -> Said {
        let all = ["--master", &self.rpc(), "--admin", &self.admin()];
        tool(&[&all[..], arguments].concat(), input)
    }

    async fn stop(self) {
        self.client.close().await.unwrap();
        self.master.stop().await;
    }
}

struct Said {
    status: i32,
    out: Vec<u8>,
    errors: String,
}

impl Said {
    fn text(&self) -> String {
        String::from_utf8(self.out.clone()).unwrap()
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.out).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// Asserts that the tool failed with these words.
    fn fails(&self, words: &[&str]) {
        assert_eq!(self.status, 1, "{}", self.errors);
        for word in words {
            assert!(self.errors.contains(word), "no {word:?} in {}", self.errors);
        }
    }
}

/// Returns the planted bug of this process, for its children.
#[allow(clippy::disallowed_methods, reason = "bugs are planted through the environment")]
fn planted() -> Option<(&'static str, std::ffi::OsString)> {
    Some((VARIABLE, std::env::var_os(VARIABLE)?))
}

fn tool(arguments: &[&str], input: &[u8]) -> Said {
    let mut child = Command::new(env!("CARGO_BIN_EXE_mooncake"))
        .env_clear()
        .envs(planted())
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The tool may have failed before it reads its input.
    let _ = child.stdin.take().unwrap().write_all(input);
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    Said { status: status.code().unwrap_or(-1), out: stdout, errors: String::from_utf8(stderr).unwrap() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_curve_is_drawn() {
    let cluster = Cluster::start(MasterOptions::default()).await;
    let drawn = cluster.tool(&["curve"], b"");
    assert!(drawn.status == 0 && drawn.text().starts_with("no uses yet"), "{}", drawn.text());
    assert_eq!(cluster.tool(&["put", "a"], b"value").status, 0);
    assert_eq!(cluster.tool(&["get", "a"], b"").status, 0);
    let curve = cluster.tool(&["curve", "--json"], b"").json();
    let factors: Vec<f64> =
        curve["points"].as_array().unwrap().iter().map(|point| point["factor"].as_f64().unwrap()).collect();
    assert_eq!(factors, [0.5, 1.0, 2.0, 4.0]);
    // The put is a miss, and each look-up is a hit.
    let uses = curve["uses"].as_u64().unwrap();
    let hit_rate = curve["points"][3]["hit_rate"].as_f64().unwrap();
    let expected = (uses - 1) as f64 / uses as f64;
    assert!(uses >= 2 && (hit_rate - expected).abs() < 1e-9, "{uses} uses, {hit_rate}");
    let drawn = cluster.tool(&["curve"], b"").text();
    let estimate = format!("Estimate from {uses} uses");
    for part in ["x 0.5", "x 4", &format!("{:.1} %", 100.0 * hit_rate), "now", "█", &estimate] {
        assert!(drawn.contains(part), "no {part:?} in {drawn}");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_come_and_go() {
    let cluster = Cluster::start(MasterOptions::default()).await;
    let binary: Vec<u8> = (0..100_000u32).map(|n| (n * 7) as u8).collect();
    let put = cluster.tool(&["put", "a/binary"], &binary);
    assert_eq!(put.status, 0, "{}", put.errors);
    assert_eq!(cluster.tool(&["get", "a/binary"], b"").out, binary);
    cluster.tool(&["put", "a/binary"], b"other").fails(&["exists", "--replace"]);
    assert_eq!(cluster.tool(&["put", "--replace", "a/binary", "-"], b"other").status, 0);

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("value").display().to_string();
    assert_eq!(cluster.tool(&["get", "a/binary", "--output", &path], b"").status, 0);
    assert_eq!(std::fs::read(&path).unwrap(), b"other");
    assert_eq!(cluster.tool(&["--json", "put", "b", &path], b"").json()["bytes"], 5);
    cluster.tool(&["put", "c", "/nonexistent/file"], b"").fails(&["/nonexistent/file"]);
    cluster.tool(&["put", "c"], b"").fails(&["empty value"]);
    cluster.tool(&["get", "nowhere"], b"").fails(&["no object", "\"nowhere\"", "default"]);
    cluster.tool(&["put", "huge"], &vec![1; 9 << 20]).fails(&["no space", "9.0 MiB"]);

    assert_eq!(cluster.tool(&["ls"], b"").text(), "a/binary\nb\n");
    assert_eq!(cluster.tool(&["ls", "a/"], b"").text(), "a/binary\n");
    let long = cluster.tool(&["--json", "ls", "--long"], b"").json();
    assert_eq!((&long[0]["key"], &long[0]["bytes"]), (&"a/binary".into(), &5.into()));
    assert!(cluster.tool(&["ls", "-l"], b"").text().contains("127.0.0.1:"));

    assert_eq!(cluster.tool(&["get", "b"], b"").out, b"other");
    cluster.tool(&["rm", "b"], b"").fails(&["in use", "--force"]);
    cluster.tool(&["rm", "--force", "b", "never"], b"").fails(&["\"never\""]);
    assert_eq!(cluster.tool(&["--json", "rm", "--force", "--matching", "^a/"], b"").json()["removed"], 1);
    assert_eq!(cluster.tool(&["ls"], b"").text(), "");
    assert_eq!(cluster.tool(&["rm"], b"").status, 2, "what to remove must be said");
    assert_eq!(cluster.tool(&["rm", "--all", "--force", "--yes"], b"").text(), "0 removed\n");
    cluster.stop().await;
}

/// An object that only a disk has returns to memory, and the others have reasons.
#[cfg(feature = "disk")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_are_prefetched() {
    use mooncake_store::client::{OffloadConfig, PutOptions};
    use mooncake_store::master::DiskOptions;
    let options = MasterOptions {
        disks: Some(DiskOptions::default()),
        lease_ttl: Duration::from_millis(200),
        ..MasterOptions::default()
    };
    let cluster = Cluster::start(options).await;
    cluster.client.close().await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let disk = OffloadConfig {
        interval: Duration::from_millis(20),
        buffer: 32 << 20,
        capacity: 64 << 20,
        ..OffloadConfig::new(folder.path())
    };
    let builder = Client::builder().master(cluster.rpc()).advertise(std::net::Ipv4Addr::LOCALHOST.into());
    let owner =
        builder.segment(8 << 20).offload(disk).timeout(Duration::from_secs(20)).connect().await.unwrap();
    let of_type = |key: &str| {
        let replicas = cluster.master.master().peek(key.as_bytes()).unwrap_or_default();
        let in_memory = replicas.iter().filter(|replica| replica.location.memory().is_some()).count();
        (in_memory, replicas.len() - in_memory)
    };
    // Memory has space for one of the values.
    let until = async |key: &str, expected| {
        let late = deadline();
        while of_type(key) != expected {
            late(key);
            tokio::task::yield_now().await;
        }
    };
    owner.put("cold", &vec![1; 6 << 20][..]).await.unwrap();
    until("cold", (1, 1)).await;
    // The disk has read the value under a lease.
    let late = deadline();
    while owner.put_with("warm", &vec![2; 6 << 20][..], &PutOptions::new().hard_pin()).await.is_err() {
        late("memory has space for the next value");
    }
    until("warm", (1, 1)).await;
    let said = cluster.tool(&["prefetch", "warm"], b"");
    assert_eq!((said.status, &*said.text()), (0, "0 requested, 1 in memory, 0 failed\n"), "{}", said.errors);
    owner.remove("warm", true).await.unwrap();
    let late = deadline();
    while cluster.master.master().stats().used() > 0 {
        late("all memory is free");
        tokio::task::yield_now().await;
    }
    let said = cluster.tool(&["--json", "prefetch", "cold", "none"], b"");
    said.fails(&["\"none\" cannot be read"]);
    assert_eq!((&said.json()["requested"], &said.json()["in_memory"]), (&json!(1), &json!(0)));
    until("cold", (1, 1)).await;
    assert_eq!(cluster.tool(&["prefetch"], b"").status, 2, "what to prefetch must be said");
    owner.close().await.unwrap();
    cluster.master.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn figures() {
    let cluster = Cluster::start(MasterOptions::default()).await;
    cluster.client.put("k", [1; 1000]).await.unwrap();
    let status = cluster.tool(&["--json", "status"], b"").json();
    assert_eq!((&status["keys"], &status["clients"]), (&1.into(), &1.into()), "{status}");
    assert_eq!(status["capacity_bytes"], 8 << 20);
    assert_eq!(status["segments"][0]["protocol"], "tcp", "{status}");
    let text = cluster.tool(&["status"], b"").text();
    assert!(text.contains("version 2.0.0") && text.contains("8.0 MiB"), "{text}");

    assert!(text.contains("misses    0\n") && status["misses"] == json!({}), "{text} {status}");

    let top = cluster.tool(&["top", "--once"], b"").text();
    assert!(top.contains("keys 1") && top.contains("put") && top.contains("[..."), "{top}");
    cluster.tool(&["top"], b"").fails(&["--once"]);

    let bench = ["bench", "--size", "4K", "--count", "20", "--concurrency", "2"];
    let measured = cluster.tool(&[&["--json"], &bench[..]].concat(), b"").json();
    for (run, name) in [(0, "put"), (1, "get")] {
        let run = &measured["runs"][run];
        assert_eq!((&run["operation"], &run["done"], &run["failed"]), (&name.into(), &20.into(), &0.into()));
        assert!(
            run["per_second"].as_f64().unwrap() > 0.0 && run["p99_us"].as_f64() >= run["p50_us"].as_f64()
        );
    }
    let shown = cluster.tool(&bench, b"").text();
    assert!(shown.contains("20 objects of 4.0 KiB, 2 at a time") && shown.contains("p99"), "{shown}");
    assert_eq!(cluster.tool(&["ls"], b"").text(), "k\n", "nothing is left behind");
    // Objects that do not fit together evict each other, and the object above.
    cluster
        .tool(&["bench", "--size", "4M", "--count", "3", "--evict"], b"")
        .fails(&["gets failed", "--count"]);
    assert_eq!(cluster.tool(&["ls"], b"").text(), "", "nor here");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wrong_is_explained() {
    let cluster = Cluster::start(MasterOptions::default()).await;
    let fails = |arguments: &[&str], words: &[&str]| tool(arguments, b"").fails(words);
    fails(&["--master", &cluster.admin(), "get", "k"], &["speaks HTTP", "RPC port"]);
    fails(&["--master", "127.0.0.1:1", "get", "k"], &["no master answers at 127.0.0.1:1", "doctor"]);
    fails(&["--timeout", "0.3", "--master", "192.0.2.1:1", "ls"], &["--admin"]);
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = silent.local_addr().unwrap().to_string();
    fails(&["--timeout", "0.3", "--master", &silent, "get", "k"], &["no master answers"]);
    assert_eq!(tool(&["--timeout", "99", "status"], b"").status, 2);

    let good = cluster.tool(&["--json", "doctor"], b"");
    let document = good.json();
    let grade = |subject: &str| {
        let findings = document["findings"].as_array().unwrap();
        findings.iter().find(|at| at["subject"] == subject).map(|at| at["grade"].as_str().unwrap().to_owned())
    };
    for subject in ["master", "admin port", "time of day", "metadata", "segments"] {
        assert_eq!(grade(subject).as_deref(), Some("ok"), "{subject}: {document}");
    }
    for subject in ["locked memory", "huge pages", "/dev/shm", "clock", "open files"] {
        assert!(grade(subject).is_some(), "{subject}: {document}");
    }
    let bad = tool(&["--master", "127.0.0.1:1", "doctor"], b"");
    assert_eq!(bad.status, 1);
    assert!(
        bad.text().contains("FAIL  master") && bad.text().contains("start mooncake_master"),
        "{}",
        bad.text()
    );
    let swapped = tool(&["--master", &cluster.admin(), "--admin", &cluster.admin(), "doctor"], b"");
    assert!(swapped.text().contains("give the RPC port"), "{}", swapped.text());

    cluster.client.close().await.unwrap();
    let empty = cluster.tool(&["doctor"], b"");
    assert_eq!(empty.status, 1);
    assert!(empty.text().contains("none is mounted"), "{}", empty.text());
    cluster.master.stop().await;
}

/// Mistakes of newcomers, with the status of the tool and the words that name the cause.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mistakes_of_newcomers_are_named() {
    let cluster = Cluster::start(MasterOptions::default()).await;
    let absent = "no master answers at 127.0.0.1:1";
    for arguments in [&["explain", "k"][..], &["ls"], &["curve"], &["top", "--once"], &["status"]] {
        tool(&[&["--master", "127.0.0.1:1"], arguments].concat(), b"").fails(&[absent, "--master"]);
    }
    let rows: [(&[&str], &[&str]); 7] = [
        (&["--cluster", "abc", "put", "k"], &["cannot use --cluster", "fixed address"]),
        (&["--tenant", "foo", "put", "k"], &["no tenants", "leave --tenant out"]),
        (&["--tenant", "foo", "bench"], &["no tenants", "leave --tenant out"]),
        (&["--metadata", "http://127.0.0.1:9/metadata", "put", "k"], &["cannot join", "http://127.0.0.1:9"]),
        (&["--json", "get", "k"], &["\"code\":-704", "\"name\":\"OBJECT_NOT_FOUND\"", "no object"]),
        (&["--json", "--tenant", "foo", "put", "k"], &["\"code\":-600", "no tenants"]),
        (&["put", "k", "/none"], &["cannot read /none"]),
    ];
    for (arguments, words) in rows {
        let said = cluster.tool(arguments, b"value");
        said.fails(words);
        assert!(!said.errors.contains("no master answers"), "{arguments:?}: {}", said.errors);
        if arguments.contains(&"--json") {
            let document: Value = serde_json::from_str(&said.errors).unwrap();
            assert!(document["error"]["message"].is_string(), "{document}");
        }
    }
    let unreadable = cluster.tool(&["explain", "k"], b"");
    assert!(unreadable.status == 1 && unreadable.text().contains("cannot be read"), "{}", unreadable.text());

    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = silent.local_addr().unwrap().to_string();
    let stopped = ["--timeout", "0.3", "--master", &silent];
    tool(&[&stopped[..], &["get", "k"]].concat(), b"").fails(&["a process listens there", "stopped"]);
    let examined = tool(&[&stopped[..], &["doctor"]].concat(), b"").text();
    assert!(examined.contains("listens and does not answer"), "{examined}");

    cluster.client.close().await.unwrap();
    cluster.tool(&["put", "k"], b"value").fails(&["no client has mounted a segment"]);
    cluster.tool(&["bench"], b"").fails(&["no client contributes memory", "--segment"]);
    cluster.master.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenants() {
    let quota = TenantQuota { name: "a".into(), bytes: 1 << 20 };
    let cluster =
        Cluster::start(MasterOptions { tenants: Some(vec![quota]), ..MasterOptions::default() }).await;
    assert_eq!(cluster.tool(&["--tenant", "a", "put", "k"], b"v").status, 0);
    assert_eq!(cluster.tool(&["--tenant", "a", "ls"], b"").text(), "k\n");
    cluster.tool(&["--tenant", "a", "put", "l"], &vec![1; 2 << 20]).fails(&["quota"]);
    cluster.tool(&["--tenant", "b", "put", "k"], b"v").fails(&["no tenant \"b\"", "--tenant"]);
    cluster.stop().await;
}

/// Misses are counted by cause and tenant, and explained by key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn misses_are_explained() {
    let quota = |name: &str| TenantQuota { name: name.into(), bytes: 1 << 20 };
    let tenants = Some(vec![quota("a"), quota("default")]);
    let cluster = Cluster::start(MasterOptions { tenants, ..MasterOptions::default() }).await;
    cluster.client.put("k", [1; 1000]).await.unwrap();
    let told = cluster.tool(&["explain", "k"], b"").text();
    assert!(told.starts_with("\"k\" can be read: 1000 B in memory at 127.0.0.1"), "{told}");
    cluster.client.remove("k", true).await.unwrap();
    let told = cluster.tool(&["explain", "k"], b"").text();
    assert_eq!(told, "\"k\" cannot be read: a client removed it (removed)\n");
    let told = cluster.tool(&["--json", "--tenant", "a", "explain", "k"], b"").json();
    assert_eq!((&told["cause"], &told["readable"]), (&"unknown".into(), &false.into()), "{told}");
    assert!(cluster.client.get("k").await.unwrap().is_none());
    cluster.tool(&["--tenant", "a", "get", "k"], b"").fails(&["no object"]);
    let status = cluster.tool(&["--json", "status"], b"").json();
    assert_eq!(status["misses"], json!({"removed": 1, "unknown": 1}), "{status}");
    assert_eq!(status["tenant_misses"], json!({"a": {"unknown": 1}, "default": {"removed": 1}}));
    let text = cluster.tool(&["status"], b"").text();
    assert!(text.contains("misses    2: 50.0 % ") && text.contains("1: 100.0 % removed by tenant"), "{text}");
    cluster.stop().await;
}

/// Returns a finding of `doctor` about a subject: grade, finding, fix.
fn finding(document: &Value, subject: &str) -> [String; 3] {
    let findings = document["findings"].as_array().unwrap();
    let found = findings.iter().find(|at| at["subject"] == subject);
    let found = found.unwrap_or_else(|| panic!("nothing about {subject}: {document}"));
    ["grade", "found", "fix"].map(|field| found[field].as_str().unwrap().to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn doctor_names_a_client_that_does_not_respond() {
    let cluster = Cluster::start(MasterOptions::default()).await;
    // The master knows an owner that does not listen, as after a freeze or behind a firewall.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").and_then(|one| one.local_addr()).unwrap();
    let (ghost, id) = (ClientId(Uuid::new(7, 7)), SegmentId(Uuid::new(7, 8)));
    let segment = Segment {
        id,
        name: "ghost:1".into(),
        base: 1 << 40,
        size: 1 << 20,
        endpoint: closed.to_string(),
        protocol: "tcp".into(),
        host_id: "ghost".into(),
        locality: None,
    };
    cluster.master.master().mount(ghost, &segment).unwrap();
    let said = cluster.tool(&["--json", "doctor"], b"");
    assert_eq!(said.status, 1);
    let [grade, found, fix] = finding(&said.json(), "segment");
    assert_eq!(grade, "fail", "{found}");
    assert!(found.contains("ghost:1") && found.contains(&closed.to_string()), "{found}");
    assert!(fix.contains("open that port") && fix.contains("--client_ttl"), "{fix}");
    let [grade, found, _] = finding(&said.json(), "segments");
    assert_eq!((&*grade, &*found), ("ok", "1 of 2 can be reached from here"));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn doctor_names_a_port_and_a_host_that_do_not_respond() {
    let nobody = "127.0.0.1:1";
    let said = tool(&["--json", "--master", nobody, "--admin", nobody, "doctor"], b"");
    assert_eq!(said.status, 1);
    for (subject, fix) in [("master", "start mooncake_master there"), ("admin port", "--metrics_port")] {
        let [grade, found, says] = finding(&said.json(), subject);
        assert!(grade == "fail" && found.contains(nobody) && says.contains(fix), "{found} -> {says}");
    }
    // The listener accepts connections and sends nothing, as a stopped process.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = silent.local_addr().unwrap().to_string();
    let said = tool(&["--json", "--timeout", "0.3", "--master", &at, "--admin", nobody, "doctor"], b"");
    let [grade, found, fix] = finding(&said.json(), "master");
    assert!(grade == "fail" && found.contains("listens") && fix.contains("stopped"), "{found} -> {fix}");
    let metadata = format!("http://{nobody}/metadata");
    let said =
        tool(&["--json", "--master", nobody, "--admin", nobody, "--metadata", &metadata, "doctor"], b"");
    let [grade, _, fix] = finding(&said.json(), "metadata");
    assert!(grade == "fail" && fix.contains("--enable_http_metadata_server"), "{fix}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn doctor_names_a_master_of_another_version() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    // The master sends its version to every connection, and ends with the test.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut asked = [0; 1024];
            let _ = std::io::Read::read(&mut stream, &mut asked);
            let mut reply = Vec::new();
            frame::write_reply(&mut reply, frame::FIRST_SEQ + 1, |out| {
                pack::encode(&Answer::<String>::Ok("9.8.7".into()), out);
                Ok(())
            });
            let _ = stream.write_all(&reply);
        }
    });
    let said = tool(&["--json", "--timeout", "2", "--master", &at, "--admin", "127.0.0.1:1", "doctor"], b"");
    let [grade, found, fix] = finding(&said.json(), "master");
    assert!(grade == "fail" && found.contains("9.8.7"), "{found}");
    assert!(fix.contains("use a master of version 2.0.0"), "{fix}");
    tool(&["--timeout", "2", "--master", &at, "get", "k"], b"").fails(&["9.8.7", "2.0.0"]);
}

/// The master is at another address than that of this machine, and a client published this address.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn doctor_names_an_address_that_means_another_machine_elsewhere() {
    let config = MasterConfig {
        rpc_address: "127.0.0.2".into(),
        rpc_port: 0,
        metrics_host: "127.0.0.2".into(),
        metrics_port: 0,
        ..MasterConfig::default()
    };
    let master = MasterServer::start(config).await.unwrap();
    let client = Client::builder()
        .master(master.addresses().rpc.to_string())
        .advertise(std::net::Ipv4Addr::LOCALHOST.into())
        .segment(8 << 20)
        .connect()
        .await
        .unwrap();
    let cluster = Cluster { master, client };
    let said = cluster.tool(&["--json", "doctor"], b"");
    assert_eq!(said.status, 1);
    let [grade, found, fix] = finding(&said.json(), "advertised address");
    assert!(grade == "fail" && found.contains("127.0.0.1"), "{found}");
    assert!(fix.contains("MOONCAKE_LOCAL_HOSTNAME"), "{fix}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn doctor_names_a_master_whose_clock_is_another() {
    let cluster = Cluster::start(MasterOptions::default()).await;
    let [grade, found, _] = finding(&cluster.tool(&["--json", "doctor"], b"").json(), "time of day");
    assert_eq!((&*grade, &*found), ("ok", "this host and the master agree"));
    // The admin port serves every endpoint without segments, in 1994.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        let page = "HTTP/1.1 200 OK\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\nConnection: close\r\n\
                    Content-Length: 16\r\n\r\n{\"segments\": []}";
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = std::io::Read::read(&mut stream, &mut [0; 1024]);
            let _ = stream.write_all(page.as_bytes());
        }
    });
    let said = tool(&["--json", "--master", &cluster.rpc(), "--admin", &at, "doctor"], b"");
    let [grade, found, fix] = finding(&said.json(), "time of day");
    assert!(grade == "note" && found.contains("behind this host's"), "{found}");
    assert!(fix.contains("chronyc") && fix.contains("timedatectl"), "{fix}");
    cluster.stop().await;
}

/// The environment of a program decides about huge pages.
#[test]
fn doctor_names_huge_pages_that_are_asked_for_and_not_there() {
    let reserved = std::fs::read_to_string("/proc/meminfo").unwrap();
    if !reserved.lines().any(|line| line.split_whitespace().eq(["HugePages_Total:", "0"])) {
        return;
    }
    let run = |wanted: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_mooncake"))
            .args(["--json", "doctor", "--local"])
            .env("MC_STORE_USE_HUGEPAGE", wanted)
            .output()
            .unwrap();
        finding(&serde_json::from_slice(&output.stdout).unwrap(), "huge pages")
    };
    assert_eq!(run("")[0], "note");
    let [grade, found, fix] = run("1");
    assert!(grade == "fail" && found.contains("MC_STORE_USE_HUGEPAGE"), "{found}");
    assert!(fix.contains("vm.nr_hugepages"), "{fix}");
}

/// Look-ups of clients become a trace: a row for each request, with its blocks in order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn look_ups_are_recorded_as_a_trace() {
    let events = EventsConfig {
        host: "127.0.0.1".into(),
        port: 0,
        backend_id: "pool".into(),
        look_ups: true,
        ..EventsConfig::default()
    };
    let cluster = Cluster::with_events(MasterOptions::default(), Some(events)).await;
    let address = cluster.master.addresses().events.unwrap().to_string();
    let mut recorder = Command::new(env!("CARGO_BIN_EXE_mooncake"))
        .args(["trace", "record", "--events", &address, "--requests", "3", "--block-tokens", "16"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The recorder is subscribed when a look-up reaches it.
    let mut number = 0_u64;
    while recorder.try_wait().unwrap().is_none() {
        let keys = [number, number + 1].map(|block| block.to_string());
        cluster.client.batch_exist(&keys).await.unwrap();
        number += 1;
    }
    let output = recorder.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.contains("requests: 3, blocks: 6"), "{said}");
    let text = String::from_utf8(output.stdout).unwrap();
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 3);
    let first = rows[0]["hash_ids"][0].as_u64().unwrap();
    for (row, block) in rows.iter().zip(first..) {
        assert_eq!(row["hash_ids"], json!([block, block + 1]));
        assert_eq!((&row["input_length"], &row["output_length"]), (&json!(32), &json!(0)));
    }
    assert_eq!(rows[0]["timestamp"], 0);
    cluster.stop().await;
    let absent = tool(&["trace", "record", "--events", &address, "--timeout", "1"], b"");
    absent.fails(&["cannot subscribe to events", "--enable_kv_events"]);
}

/// Two processes that hash one prompt differently find nothing of each other.
#[test]
fn doctor_compares_the_keys_of_two_processes() {
    let folder = tempfile::tempdir().unwrap();
    let list = |name: &str, hash: &str| {
        let path = folder.path().join(name).display().to_string();
        let key = |rank| format!("m@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@group:0@{}\n", hash.repeat(32));
        std::fs::write(&path, key(0) + &key(1)).unwrap();
        path
    };
    let (one, equal, other) = (list("one", "ab"), list("equal", "ab"), list("other", "cd"));
    let agreed = tool(&["doctor", "--keys", &one, &equal], b"");
    assert!(agreed.status == 0 && agreed.text().contains("same blocks: 1"), "{}", agreed.text());
    let differ = tool(&["--json", "doctor", "--keys", &one, &other], b"");
    assert_eq!(differ.status, 1);
    let [grade, _, fix] = finding(&differ.json(), "hashes");
    assert!(grade == "fail" && fix.contains("sha256_cbor"), "{fix}");
    let absent = folder.path().join("absent").display().to_string();
    tool(&["doctor", "--keys", &one, &absent], b"").fails(&["cannot read keys", "absent"]);
}

/// The tool inherits the limit from the shell.
#[test]
fn doctor_names_a_low_limit_of_locked_memory() {
    let run = |limit: &str| {
        let script = format!("ulimit -l {limit} && exec \"$0\" --json doctor --local");
        let output =
            Command::new("sh").args(["-c", &script, env!("CARGO_BIN_EXE_mooncake")]).output().unwrap();
        let document: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
        finding(&document, "locked memory")
    };
    let [grade, found, fix] = run("64");
    // With RDMA devices the check fails; without them the result is a note.
    assert!(["note", "fail"].contains(&&*grade), "{grade}");
    assert!(found.contains("64.0 KiB") && fix.contains("ulimit -l unlimited"), "{found} -> {fix}");
}

/// Stores objects of users that fill most of the cluster.
async fn fill(cluster: &Cluster) -> String {
    for n in 0..24 {
        cluster.client.put(format!("user/{n:02}"), vec![n as u8; 128 << 10]).await.unwrap();
    }
    cluster.tool(&["ls"], b"").text()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bench_refuses_to_evict_objects_of_users() {
    let cluster = Cluster::start(MasterOptions::default()).await;
    let keys = fill(&cluster).await;
    assert_eq!(keys.lines().count(), 24);
    let large = ["bench", "--size", "256K", "--count", "20"];
    cluster.tool(&large, b"").fails(&["would evict", "wanted=5.0 MiB", "--count", "--segment", "--evict"]);
    assert_eq!(cluster.tool(&["ls"], b"").text(), keys, "nothing is evicted");
    // Values that fit nowhere as a whole need evictions, too.
    cluster.tool(&["bench", "--size", "6M", "--count", "1"], b"").fails(&["would evict"]);

    let small = cluster.tool(&["bench", "--size", "64K", "--count", "20"], b"");
    assert_eq!(small.status, 0, "{}", small.errors);
    let text = small.text();
    assert!(text.contains("keys mooncake-bench/* are removed; no object was evicted"), "{text}");
    assert_eq!(cluster.tool(&["ls"], b"").text(), keys, "its own objects are gone, and no others");
    let json = cluster.tool(&["--json", "bench", "--size", "64K", "--count", "20"], b"").json();
    assert_eq!(json["evicted"], 0, "{json}");

    let forced = cluster.tool(&[&large[..], &["--evict"]].concat(), b"");
    assert!(!forced.text().contains("no object was evicted"), "{}", forced.text());
    assert!(cluster.tool(&["ls"], b"").text().lines().count() < 24, "--evict allows it");
    cluster.stop().await;
    // Memory of the benchmark itself provides the space.
    let cluster = Cluster::start(MasterOptions::default()).await;
    assert_eq!(fill(&cluster).await, keys);
    let own = cluster.tool(&[&large[..], &["--segment", "16M"]].concat(), b"");
    assert_eq!(own.status, 0, "{}", own.errors);
    assert_eq!(cluster.tool(&["ls"], b"").text(), keys);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rm_of_all_asks_and_tells_what_is_left() {
    let lease_ttl = Duration::from_secs(600);
    let cluster = Cluster::start(MasterOptions { lease_ttl, ..MasterOptions::default() }).await;
    for key in ["a", "b", "leased"] {
        cluster.client.put(key, vec![1; 1000]).await.unwrap();
    }
    assert_eq!(cluster.tool(&["get", "leased"], b"").status, 0);
    cluster.tool(&["rm", "--all"], b"").fails(&["cannot ask", "all 3 objects", "--yes"]);
    assert_eq!(cluster.tool(&["ls"], b"").text(), "a\nb\nleased\n", "nothing is removed unasked");
    let address = cluster.rpc();
    let admin = cluster.admin();
    let words = ["--master", &address, "--admin", &admin];
    let (status, said) = on_terminal(&[&words[..], &["rm", "--all"]].concat(), "n\n");
    assert!(status == 1 && said.contains("[y/N]") && said.contains("nothing is removed"), "{said}");
    let (status, said) = on_terminal(&[&words[..], &["rm", "--all"]].concat(), "yes\n");
    assert_eq!(status, 1, "{said}");
    for part in ["2 removed", "1 left", "\"leased\"", "--force"] {
        assert!(said.contains(part), "no {part:?} in {said}");
    }
    let told = said.split_once("leased for ").and_then(|(_, rest)| rest.split_once(" s")?.0.parse().ok());
    assert!(told.is_some_and(|seconds: u64| (1..=600).contains(&seconds)), "{said}");
    cluster.tool(&["rm", "leased"], b"").fails(&["\"leased\" is in use, leased for ", "--force"]);
    assert_eq!(cluster.tool(&["ls"], b"").text(), "leased\n");
    cluster.tool(&["rm", "--matching", "^lea"], b"").fails(&["1 left", "lease", "--force"]);
    let done = cluster.tool(&["rm", "--all", "--yes", "--force"], b"");
    assert_eq!((done.status, &*done.text()), (0, "1 removed\n"), "{}", done.errors);
    cluster.stop().await;
}

#[test]
fn a_pattern_is_compiled_before_anything_is_asked() {
    // The check of the pattern needs no master.
    let said = tool(&["--master", "127.0.0.1:1", "rm", "--matching", "g("], b"");
    said.fails(&["\"g(\"", "--matching", "unclosed group"]);
    assert!(!said.errors.contains("no master answers"), "{}", said.errors);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_without_tenants_is_named() {
    let cluster = Cluster::start(MasterOptions::default()).await;
    cluster.client.put("k", [1; 10]).await.unwrap();
    let listed = cluster.tool(&["--tenant", "foo", "ls"], b"");
    assert_eq!((listed.status, &*listed.text()), (0, "k\n"));
    assert!(listed.errors.contains("no tenants") && listed.errors.contains("foo"), "{}", listed.errors);
    cluster.tool(&["--tenant", "foo", "rm", "--all", "--yes"], b"").fails(&["no tenants", "every object"]);
    assert_eq!(cluster.tool(&["ls"], b"").text(), "k\n");
    assert!(!cluster.tool(&["ls"], b"").errors.contains("tenants"));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn top_and_status_name_what_is_there() {
    let cluster = Cluster::start(MasterOptions::default()).await;
    cluster.client.put("k", [1; 1000]).await.unwrap();
    let top = cluster.tool(&["--json", "top", "--once"], b"").json();
    assert_eq!(
        (&top["keys"], &top["clients"], &top["capacity_bytes"]),
        (&1.into(), &1.into(), &(8 << 20).into())
    );
    assert_eq!(top["segments"].as_array().unwrap().len(), 1, "{top}");
    assert!(top["totals"]["master_ping_requests_total"].is_u64(), "{top}");
    cluster.tool(&["--json", "top"], b"").fails(&["--once"]);
    let program = format!("mooncake-rs {}, speaks Mooncake 0.3.13", env!("CARGO_PKG_VERSION"));
    let status = cluster.tool(&["status"], b"").text();
    assert!(status.contains(&program), "{status}");
    assert!(
        cluster.tool(&["--json", "status"], b"").json()["program"].as_str().unwrap().starts_with(&program)
    );
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminals_get_no_binary_values() {
    let cluster = Cluster::start(MasterOptions::default()).await;
    cluster.client.put("binary", [0x1b, b'[', b'2', b'J', 0xff, 0]).await.unwrap();
    cluster.client.put("text", "k\u{e4}se\n").await.unwrap();
    let (address, admin) = (cluster.rpc(), cluster.admin());
    let words = ["--master", &address, "--admin", &admin, "get"];
    let (status, said) = on_terminal(&[&words[..], &["binary"]].concat(), "");
    assert!(status == 1 && said.contains("--output") && !said.contains('\u{1b}'), "{said:?}");
    let (status, said) = on_terminal(&[&words[..], &["text"]].concat(), "");
    assert!(status == 0 && said.contains("k\u{e4}se"), "{said:?}");
    assert_eq!(cluster.tool(&["get", "binary"], b"").out.len(), 6, "a pipe takes everything");
    cluster.stop().await;
}

/// Runs the tool on a terminal of its own, which `script` of util-linux makes. Returns status and
/// output.
fn on_terminal(arguments: &[&str], input: &str) -> (i32, String) {
    let quoted: Vec<String> = std::iter::once(&env!("CARGO_BIN_EXE_mooncake"))
        .chain(arguments)
        .map(|word| format!("'{}'", word.replace('\'', "'\\''")))
        .collect();
    let mut child = Command::new("script")
        .args(["--quiet", "--return", "--command", &quoted.join(" "), "/dev/null"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    (output.status.code().unwrap_or(-1), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(feature = "metadata-etcd")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leader_of_several_masters_is_found_in_etcd() {
    let cluster = Cluster::start(MasterOptions::default()).await;
    let etcd = format!("etcd://{}", crate::common::fake_etcd::start(&cluster.rpc()));
    let admin = cluster.admin();
    let words = ["--master", &etcd, "--admin", &admin];
    let run = |rest: &[&str]| tool(&[&words[..], rest].concat(), b"value");
    let status = run(&["status"]);
    assert!(
        status.status == 0 && status.text().contains(&cluster.rpc()),
        "{}{}",
        status.text(),
        status.errors
    );
    assert_eq!(run(&["put", "k"]).status, 0);
    assert_eq!(run(&["get", "k"]).out, b"value");
    assert_eq!(run(&["ls"]).text(), "k\n");
    let doctor = run(&["--json", "doctor"]);
    let [grade, found, _] = finding(&doctor.json(), "master");
    assert!(grade == "ok" && found.contains(&cluster.rpc()), "{found}");
    let said = tool(&["--master", "etcd://127.0.0.1:1", "--timeout", "0.5", "doctor", "--json"], b"");
    let [grade, found, fix] = finding(&said.json(), "master");
    assert!(
        grade == "fail" && found.contains("etcd://127.0.0.1:1") && fix.contains("--enable_ha"),
        "{found} {fix}"
    );
    cluster.stop().await;
}

/// Runs all commands whose output `head` may cut off.
#[test]
fn a_closed_pipe_is_no_panic() {
    for (program, flag) in [
        (env!("CARGO_BIN_EXE_mooncake_master"), "--print_config"),
        (env!("CARGO_BIN_EXE_mooncake_master"), "--help"),
        (env!("CARGO_BIN_EXE_mooncake_client"), "--help"),
        (env!("CARGO_BIN_EXE_mooncake"), "--help"),
    ] {
        // The pipe has no reader.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = Command::new(program).arg(flag).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!said.contains("panicked"), "{program} {flag}: {said}");
        assert_eq!(output.status.code(), Some(0), "{program} {flag}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_refuse_what_cannot_work() {
    let cluster = Cluster::start(MasterOptions::default()).await;
    let join = |master: &str, hostname: &str| {
        Client::builder()
            .master(master)
            .local_hostname(hostname)
            .segment(1 << 20)
            .connect_timeout(Duration::from_secs(10))
    };
    let error = join(&cluster.rpc(), "nohost.invalid").connect().await.unwrap_err();
    assert!(
        error.to_string().contains("does not resolve") && error.to_string().contains("nohost.invalid"),
        "{error}"
    );
    join(&cluster.rpc(), "localhost").connect().await.unwrap().close().await.unwrap();
    // A client that continues to try ends with another error.
    let error = join(&cluster.admin(), "localhost").connect().await.unwrap_err();
    assert_eq!(error.code(), mooncake_core::ErrorCode::InvalidParams, "{error}");
    assert!(error.to_string().contains("speaks HTTP") && error.to_string().contains("RPC port"), "{error}");
    let error = join(&cluster.rpc(), "localhost").metadata("p2phandshake").connect().await.unwrap_err();
    assert!(error.to_string().contains("did you mean P2PHANDSHAKE"), "{error}");
    let error = join(&cluster.rpc(), "localhost")
        .segment(1 << 50)
        .allow_overcommit(false)
        .connect()
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("cannot offer memory") && error.to_string().contains("allow_overcommit"),
        "{error}"
    );
    let client = join(&cluster.rpc(), "localhost").allow_overcommit(false).connect().await.unwrap();
    let error = client.segments().mount(1 << 50).await.unwrap_err();
    assert!(error.to_string().contains("cannot offer memory"), "{error}");
    client.close().await.unwrap();
    cluster.stop().await;
}
