//! Transfers between two processes. The owner of the memory is this test program, started again for
//! the one test that serves until it is killed.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mooncake_core::ErrorKind;
use mooncake_core::clock::SystemClock;
use mooncake_rdma::RdmaPeer;
use mooncake_transport::transfer::{self, Transfer};
use mooncake_transport::{SegmentDesc, Transport};

use crate::support::{NodePair, describe, local, node, open, patient, runtime};

const LEN: usize = 1 << 20;

/// Process of the owner: prints its descriptor, then waits for the end.
#[test]
#[ignore = "runs as the other process of the tests in this file"]
fn owner() {
    let mut orders = std::io::stdin().lines();
    let Some(Ok(device)) = orders.next() else { return };
    let runtime = runtime();
    let (node, _port) = node(&runtime, SystemClock::shared(), patient(&device));
    let region = open(&node, LEN, 7);
    let mut out = std::io::stdout();
    let desc = describe(&node, &[&region]).encode();
    out.write_all(&[&desc[..], b"\n"].concat()).unwrap();
    out.flush().unwrap();
    orders.for_each(drop);
}

struct Owner {
    child: Child,
    desc: SegmentDesc,
}

impl Owner {
    fn start(device: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "processes::owner", "--ignored", "--nocapture", "--test-threads=1"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        writeln!(child.stdin.as_mut().unwrap(), "{device}").unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let said = lines.map_while(Result::ok).find_map(|line| Some(line[line.find('{')?..].to_owned()));
        let desc = SegmentDesc::decode(said.expect("the owner prints its descriptor").as_bytes()).unwrap();
        Self { child, desc }
    }

    fn at(&self) -> u64 {
        self.desc.buffers[0].addr
    }

    fn connect(&self, two: &NodePair) -> RdmaPeer {
        two.runtime.block_on(two.a.connect(&self.desc)).unwrap()
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn another_process_is_read_and_written() {
    for device in ["rxe1", "rxe0"] {
        let two = NodePair::patient();
        let owner = Owner::start(device);
        let peer = owner.connect(&two);
        assert!(two.read(&two.a, &peer, owner.at(), LEN).unwrap() == vec![7; LEN], "from {device}");
        let sent: Vec<u8> = (0..LEN / 2).map(|i| (i >> 8) as u8).collect();
        two.write(&two.a, &peer, owner.at() + 5, &sent).unwrap();
        assert!(two.read(&two.a, &peer, owner.at() + 5, LEN / 2).unwrap() == sent);
        let error = two.read(&two.a, &peer, owner.at() + LEN as u64 - 8, 16).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
}

#[test]
fn a_process_killed_in_the_middle_is_an_error_and_its_successor_serves() {
    let two = NodePair::patient();
    let mut owner = Owner::start("rxe1");
    let peer = owner.connect(&two);
    two.read(&two.a, &peer, owner.at(), 64).unwrap();
    let writes = |byte: u8| {
        let part = |i: u64| Transfer::new(owner.at() + i * 4096, local(&two.a, &[byte; 4096]).into_shared());
        transfer::write(&*two.a, &peer, (0..200).map(part).collect::<Vec<_>>(), two.deadline_in(20))
    };
    let tickets: Vec<_> = (0..4).map(writes).collect();
    // Some transfers are posted, and none has been waited for.
    owner.kill();
    for ticket in tickets {
        if let Err(error) = ticket.wait().0 {
            assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout), "{error}");
        }
    }
    let start = two.clock.now();
    let transfers = [Transfer::new(owner.at(), local(&two.a, &[0; 64]))];
    let error = transfer::read(&*two.a, &peer, transfers, two.deadline_in(20)).wait().0.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout), "{error}");
    assert!(two.clock.now().since(start) < Duration::from_secs(40), "a dead peer delays nobody");
    let next = Owner::start("rxe1");
    let peer = next.connect(&two);
    assert_eq!(two.read(&two.a, &peer, next.at(), 64).unwrap(), [7; 64]);
}
