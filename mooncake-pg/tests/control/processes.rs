//! Processes that are killed, stopped, and started again.

use crate::worker::Worker;

/// Starts the processes of four ranks, and waits until all of them have the first view.
fn four() -> (String, Vec<Worker>) {
    let mut first = Worker::start(0, "", false);
    let coordinator = first.expect("coordinator");
    let mut workers = vec![first];
    workers.extend((1..4).map(|rank| Worker::start(rank, &coordinator, false)));
    for worker in &mut workers {
        worker.expect("ready");
    }
    for worker in &mut workers {
        worker.expect_view("[0, 1, 2, 3]");
    }
    (coordinator, workers)
}

#[test]
fn a_killed_process_leaves_and_another_one_takes_its_slot() {
    let (coordinator, mut workers) = four();
    workers.pop().unwrap().kill();
    // The window is two minutes long: it was closed early.
    for worker in &mut workers {
        worker.expect_view("[0, 1, 2]");
    }
    let mut replacement = Worker::start(3, &coordinator, true);
    replacement.expect("ready");
    replacement.command("join");
    assert!(workers[1].result("activate 3").contains("Applied"));
    assert_eq!(replacement.expect("done join:"), "Ok(())");
    workers.push(replacement);
    for worker in &mut workers {
        worker.expect_view("[0, 1, 2, 3]");
    }
    for worker in &mut workers {
        worker.command("quit");
    }
    for worker in &mut workers {
        worker.expect("left");
        assert!(worker.wait());
    }
}

#[test]
fn a_stopped_process_is_not_alive_and_comes_back_in_place() {
    let (_, mut workers) = four();
    assert_eq!(workers[0].result("alive 2"), "true");
    workers[2].stop();
    assert_eq!(workers[0].result("alive 2"), "false");
    // The others probe the process, and close the window early.
    let outcome = workers[0].result("fail 2");
    assert!(outcome.starts_with("Reconciled") || outcome.starts_with("NoPending"), "{outcome}");
    for rank in [0, 1, 3] {
        workers[rank].expect_view("[0, 1, 3]");
    }
    workers[2].signal("-CONT");
    workers[2].expect_view("[0, 1, 3]");
    assert_eq!(workers[0].result("alive 2"), "true");
    workers[2].command("join");
    let outcome = workers[3].result("activate 2");
    assert!(outcome.contains("Applied"), "{outcome}");
    assert_eq!(workers[2].expect("done join:"), "Ok(())");
    for worker in &mut workers {
        worker.expect_view("[0, 1, 2, 3]");
    }
}

#[test]
fn calls_fail_by_name_after_the_death_of_rank_0() {
    let (_, mut workers) = four();
    workers.remove(0).kill();
    for (worker, command) in workers.iter_mut().zip(["fail 0", "deactivate 0", "fail 0"]) {
        let result = worker.result(command);
        assert!(result.contains("the coordinator does not respond"), "{command}: {result}");
    }
    assert_eq!(workers[0].result("alive 0"), "false");
    assert_eq!(workers[0].result("alive 2"), "true");
    for worker in &mut workers {
        worker.command("quit");
    }
    for worker in &mut workers {
        worker.expect("left");
        assert!(worker.wait());
    }
}
