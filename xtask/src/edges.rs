//! `cargo xtask edges`: tests of rare interleavings. Each test runs once as built, and once more
//! with each planted bug that it must detect.
#![allow(clippy::disallowed_methods, reason = "the limit is of real time")]

use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::run::{Result, cargo, listed, step, test_program};

/// Test, and the bugs that make it fail. The names of bugs are those of
/// `mooncake_core::fault_injection::is_planted`.
struct Edge {
    /// Test program (`tests/<program>`), or `lib <crate_name>` for the unit tests of a crate.
    program: &'static str,
    /// Path of the test in the program: modules and function.
    test: &'static str,
    bugs: &'static [&'static str],
}

/// Tests by subject. A new fix of this kind adds its test and the bug that reverts the fix.
const EDGES: &[(&str, &[Edge])] = &[
    (
        "A",
        &[
            Edge {
                program: "client",
                test: "lent_memory::a_dropped_read_keeps_the_memory_lent_to_it",
                bugs: &["a-slice-keeps-the-arena-and-not-the-extent"],
            },
            Edge {
                program: "client",
                test: "local::lent_memory::memory_stays_taken_while_the_owner_may_write_to_it",
                bugs: &["a-slice-keeps-the-arena-and-not-the-extent"],
            },
            Edge {
                program: "calls",
                test: "an_address_names_the_part_that_is_lent",
                bugs: &["an-address-finds-the-arena-and-not-the-extent", "a-call-ends-before-its-bytes-land"],
            },
            Edge {
                program: "calls",
                test: "closing_waits_for_transfers_however_often_it_is_given_up",
                bugs: &["closing-again-does-not-wait-for-transfers"],
            },
            Edge {
                program: "calls",
                test: "unregistered_memory_is_looked_up_and_waited_for",
                bugs: &["unregistered-memory-is-not-waited-for"],
            },
            Edge {
                program: "calls",
                test: "memory_of_dropped_regions_is_waited_for",
                bugs: &["dropped-regions-are-not-waited-for"],
            },
        ],
    ),
    (
        "B",
        &[Edge {
            program: "client",
            test: "sessions::a_dropped_write_is_not_committed",
            bugs: &["session-forgets-dropped-writes"],
        }],
    ),
    (
        "sessions",
        &[Edge {
            program: "client",
            test: "session_property::sessions_commit_what_was_written_and_keep_space_while_bytes_may_land",
            bugs: &["session-forgets-dropped-writes", "session-ignores-late-writes"],
        }],
    ),
    (
        "D",
        &[
            Edge {
                program: "client",
                test: "identity::an_object_of_the_process_before_is_not_read_from_the_next_one",
                bugs: &["store-ignores-instances"],
            },
            Edge {
                program: "client",
                test: "identity::memory_that_waits_for_its_mount_is_not_used",
                bugs: &["store-ignores-pending-mounts"],
            },
            Edge {
                program: "client",
                test: "identity::a_reservation_of_the_process_before_is_not_written_to_the_next_one",
                bugs: &["store-ignores-instances"],
            },
            Edge {
                program: "client",
                test: "identity::a_copy_is_not_written_to_the_next_process",
                bugs: &["store-ignores-pending-mounts"],
            },
            Edge {
                program: "client",
                test: "loans::a_value_that_one_process_lends_is_not_read_from_the_next_one",
                bugs: &["store-ignores-instances"],
            },
        ],
    ),
    (
        "C",
        &[
            Edge {
                program: "client",
                test: "sessions::space_of_a_write_that_timed_out_is_not_revoked",
                bugs: &["session-ignores-late-writes"],
            },
            Edge {
                program: "client",
                test: "sessions::space_of_a_dropped_write_is_revoked_once_it_has_landed",
                bugs: &["session-ignores-late-writes"],
            },
            Edge {
                program: "client",
                test: "sessions::space_of_a_copy_is_not_revoked_while_one_of_its_writes_may_land",
                bugs: &["copy-hides-late-writes"],
            },
        ],
    ),
    (
        "J",
        &[
            Edge {
                program: "lib mooncake_server",
                test: "ticker::tests::a_stop_at_any_point_of_a_turn_expires_nobody",
                bugs: &["ticker-measures-sleep-only"],
            },
            Edge {
                program: "master",
                test: "disks::an_upsert_in_place_waits_for_the_disk_that_reads_the_value",
                bugs: &["upsert-ignores-disk-promises"],
            },
            Edge {
                program: "master",
                test: "disks::space_of_a_value_that_an_announced_one_replaces_waits_for_its_disk",
                bugs: &["announcement-ignores-disk-promises"],
            },
            Edge {
                program: "client",
                test: "lossy::objects_outlive_masters_after_two_restarts_during_one_remount",
                bugs: &["inventory-keeps-the-dead-epoch"],
            },
        ],
    ),
    (
        "E",
        &[
            Edge {
                program: "processes",
                test: "listeners::a_master_withstands_connections_that_hold_back",
                bugs: &[
                    "full-listener-refuses",
                    "connections-never-idle-again",
                    "pages-stop-waits-for-peers",
                ],
            },
            Edge {
                program: "lib mooncake_server",
                test: "leader::tests::a_stopping_leader_leads_until_its_last_work_is_done",
                bugs: &["stopping-leader-does-not-renew"],
            },
        ],
    ),
    (
        "F",
        &[
            Edge {
                program: "processes",
                test: "listeners::a_master_takes_the_descriptors_it_may_have",
                bugs: &["descriptor-limit-not-raised"],
            },
            Edge {
                program: "processes",
                test: "listeners::a_client_withstands_connections_that_hold_back",
                bugs: &["full-listener-refuses"],
            },
            Edge {
                program: "lib mooncake_transport",
                test: "admission::tests::each_wait_has_its_limit",
                bugs: &["connections-wait-for-ever"],
            },
            Edge {
                program: "processes",
                test: "listeners::control_connections_leave_slots_for_calls",
                bugs: &["controls-take-all-places"],
            },
            Edge { program: "meta", test: "a_full_directory_refuses_by_name", bugs: &["metadata-unbounded"] },
            Edge {
                program: "lib mooncake_metadata",
                test: "etcd::tests::a_watch_that_nobody_reads_holds_few_events",
                bugs: &["etcd-watch-unbounded"],
            },
        ],
    ),
    (
        "H",
        &[
            Edge {
                program: "master",
                test: "promised_leases::a_client_tells_of_longer_leases",
                bugs: &["promise-forgotten"],
            },
            Edge {
                program: "lib mooncake_server",
                test: "config::tests::space_of_a_grant_rests_for_as_long_as_clients_may_write",
                bugs: &["grants-shorter-than-their-use"],
            },
            Edge {
                program: "lib mooncake_server",
                test: "leader::tests::a_new_leader_knows_the_promises_of_the_one_before",
                bugs: &["leader-keeps-no-promise"],
            },
            Edge {
                program: "master",
                test: "promised_leases::a_snapshot_tells_of_longer_leases",
                bugs: &["promise-forgotten"],
            },
        ],
    ),
    (
        "I",
        &[
            Edge {
                program: "master",
                test: "expired_clients::what_is_removed_after_it_was_listed_stays_away",
                bugs: &["expired-removals-forgotten"],
            },
            Edge {
                program: "processes",
                test: "partition::an_owner_that_was_stopped_serves_its_objects_again",
                bugs: &["expired-not-fetched", "expired-removals-forgotten"],
            },
            Edge {
                program: "processes",
                test: "partition::three_clients_behind_a_relay_that_was_stopped_serve_their_objects_again",
                bugs: &["expired-not-fetched"],
            },
            Edge {
                program: "protocol",
                test: "overload::no_client_expires_under_ten_times_the_load",
                bugs: &["heartbeats-in-line"],
            },
            Edge {
                program: "protocol",
                test: "overload::a_request_whose_caller_has_given_up_is_not_served",
                bugs: &["serve-abandoned-requests"],
            },
            Edge {
                program: "protocol",
                test: "overload::clients_of_a_restarted_master_announce_one_after_another",
                bugs: &["announce-at-once"],
            },
        ],
    ),
    (
        "D",
        &[
            Edge {
                program: "instance",
                test: "a_process_that_took_over_port_and_address_is_not_used",
                bugs: &["tcp-no-hello"],
            },
            Edge {
                program: "instance",
                test: "requests_under_way_are_not_sent_again_to_another_process",
                bugs: &["tcp-no-hello"],
            },
            Edge {
                program: "instance",
                test: "a_killed_process_is_not_confused_with_the_next_one_on_its_port",
                bugs: &["tcp-no-hello"],
            },
            Edge {
                program: "instance",
                test: "requests_behind_a_hello_for_another_process_are_not_read",
                bugs: &["tcp-hello-for-any-instance"],
            },
        ],
    ),
    (
        "G",
        &[
            Edge {
                program: "server",
                test: "the_connection_that_waits_longest_is_closed",
                bugs: &["connections-never-idle-again", "full-listener-refuses"],
            },
            Edge {
                program: "server",
                test: "no_operation_fails_while_connections_are_closed",
                bugs: &["connections-never-idle-again"],
            },
        ],
    ),
    (
        "J",
        &[
            Edge {
                program: "lib mooncake_core",
                test: "fork::tests::a_port_is_free_while_a_child_lives_on",
                bugs: &["fork-inherits"],
            },
            Edge {
                program: "lib mooncake_core",
                test: "fork::tests::a_lock_is_free_while_a_child_lives_on",
                bugs: &["fork-inherits"],
            },
            Edge {
                program: "instance",
                test: "the_port_of_a_killed_process_is_free_while_its_child_lives_on",
                bugs: &["fork-inherits"],
            },
            Edge { program: "processes", test: "forked::no_listener_is_inherited", bugs: &["fork-inherits"] },
            Edge {
                program: "processes",
                test: "forked::the_segment_file_of_a_killed_process_is_free_while_its_child_lives_on",
                bugs: &["fork-inherits", "lock-holder-unnamed"],
            },
            Edge {
                program: "processes",
                test: "forked::the_disk_of_a_killed_process_is_free_while_its_child_lives_on",
                bugs: &["fork-inherits"],
            },
        ],
    ),
    (
        "gate",
        &[Edge {
            program: "gate",
            test: "no_reader_is_inside_after_the_gate_is_shut",
            bugs: &["tcp-gate-looks-first", "tcp-gate-does-not-wait"],
        }],
    ),
    (
        "traps",
        &[
            Edge {
                program: "processes",
                test: "tool::bench_refuses_to_evict_objects_of_users",
                bugs: &["evicting-bench"],
            },
            Edge {
                program: "processes",
                test: "tool::rm_of_all_asks_and_tells_what_is_left",
                bugs: &["rm-all-unasked", "silent-rm", "lease-time-untold"],
            },
            Edge {
                program: "processes",
                test: "tool::a_pattern_is_compiled_before_anything_is_asked",
                bugs: &["pattern-unchecked"],
            },
            Edge {
                program: "processes",
                test: "tool::a_tenant_without_tenants_is_named",
                bugs: &["silent-tenant"],
            },
            Edge {
                program: "processes",
                test: "tool::top_and_status_name_what_is_there",
                bugs: &["plain-top"],
            },
            Edge {
                program: "processes",
                test: "tool::terminals_get_no_binary_values",
                bugs: &["binary-to-tty"],
            },
            Edge {
                program: "processes",
                test: "tool::a_closed_pipe_is_no_panic",
                bugs: &["panic-on-broken-pipe"],
            },
            Edge {
                program: "processes",
                test: "tool::clients_refuse_what_cannot_work",
                bugs: &["unresolved-name", "patient-with-http", "p2p-in-small-letters", "overcommit"],
            },
            Edge {
                program: "processes",
                test: "master_program::a_master_that_serves_every_user_warns",
                bugs: &["silent-start"],
            },
            Edge {
                program: "processes",
                test: "local_clients::an_owner_that_is_terminated_drains_first",
                bugs: &["no-drain-on-term"],
            },
            Edge {
                program: "processes",
                test: "local_clients::objects_of_an_owner_that_is_terminated_move_to_another",
                bugs: &["no-drain-on-term"],
            },
            Edge {
                program: "lib mooncake_client",
                test: "overcommit::tests::programs_choose_whether_memory_is_checked",
                bugs: &["overcommit"],
            },
        ],
    ),
    (
        "pg",
        &[
            Edge {
                program: "lib mooncake_pg",
                test: "comm::tests::failures::survivors_of_a_random_end_have_one_result",
                bugs: &["pg-operation-ends-before-all-are-ready"],
            },
            Edge {
                program: "lib mooncake_pg",
                test: "comm::tests::failures::a_rank_that_lacks_a_last_message_has_the_result_of_one_that_has_finished",
                bugs: &["pg-finished-rank-is-not-asked"],
            },
            Edge {
                program: "lib mooncake_pg",
                test: "comm::tests::failures::a_ready_rank_may_end_while_another_one_is_not_ready",
                bugs: &["pg-loss-of-a-ready-rank-is-a-failure"],
            },
            Edge {
                program: "lib mooncake_pg",
                test: "comm::tests::failures::a_rank_that_was_stopped_finishes_only_what_the_others_have_finished",
                bugs: &["pg-abandoned-round-is-finished"],
            },
            Edge {
                program: "lib mooncake_pg",
                test: "comm::tests::failures::a_rank_that_was_stopped_takes_all_messages_before_it_finishes",
                bugs: &["pg-messages-wait-while-a-rank-finishes"],
            },
            Edge {
                program: "lib mooncake_pg",
                test: "comm::tests::failures::a_rank_that_was_stopped_asks_the_others_before_it_finishes",
                bugs: &["pg-stopped-rank-asks-nobody"],
            },
            Edge {
                program: "lib mooncake_pg",
                test: "comm::tests::failures::a_rank_that_was_stopped_has_the_result_of_those_that_have_ended",
                bugs: &["pg-last-rank-repeats-alone"],
            },
            Edge {
                program: "lib mooncake_pg",
                test: "comm::tests::failures::a_rank_that_was_stopped_while_it_asks_for_another_one_asks_again",
                bugs: &["pg-stopped-rank-accuses-others"],
            },
            Edge {
                program: "lib mooncake_pg",
                test: "comm::tests::failures::a_message_from_a_rank_that_has_closed_its_communicator_is_not_waited_for",
                bugs: &["pg-closed-communicator-is-waited-for"],
            },
            Edge {
                program: "lib mooncake_pg",
                test: "link::tests::a_ring_without_end_does_not_keep_the_thread",
                bugs: &["pg-ring-is-read-to-its-end"],
            },
            Edge {
                program: "lib mooncake_pg",
                test: "comm::tests::p2p::the_end_of_a_send_starts_the_next_one",
                bugs: &["pg-callback-runs-under-a-lock"],
            },
            Edge {
                program: "lib mooncake_pg",
                test: "link::tests::nothing_of_an_earlier_connection_comes_after_a_later_one",
                bugs: &["pg-earlier-connection-goes-on"],
            },
            Edge {
                program: "lib mooncake_pg",
                test: "link::tests::the_task_of_a_replaced_connection_leaves_the_later_one_alone",
                bugs: &["pg-replaced-connection-is-used"],
            },
            Edge {
                program: "lib mooncake_pg",
                test: "comm::tests::failures::a_rank_that_closes_its_communicator_is_left_out_and_not_accused",
                bugs: &["pg-closed-communicator-is-a-failed-link"],
            },
            Edge {
                program: "lib mooncake_pg",
                test: "comm::tests::failures::bytes_that_were_given_up_do_not_count",
                bugs: &["pg-stamps-are-not-looked-at"],
            },
            Edge {
                program: "lib mooncake_pg",
                test: "comm::tests::failures::a_stopped_receiver_gets_no_bytes_of_a_later_message",
                bugs: &["pg-stamps-are-not-looked-at"],
            },
            Edge {
                program: "lib mooncake_pg",
                test: "comm::tests::failures::a_rank_that_dies_half_way_leaves_no_byte",
                bugs: &["pg-bytes-are-read-in-place"],
            },
        ],
    ),
];

/// Maximum duration of one run of a test.
const LIMIT: Duration = Duration::from_secs(120);
/// Number of tests that run at the same time. Most of them wait.
const AT_A_TIME: usize = 3;

/// Runs every test of the table, and every test with each of its bugs. A bug that its test does not
/// detect is an error.
pub(crate) fn run(words: &[&str]) -> Result {
    step("edges");
    let built = cargo(&["test", "--workspace", "--all-features", "--no-run"]).shown_output()?;
    let mut runs = Vec::new();
    for (subject, edges) in EDGES {
        for edge in *edges {
            if !words.is_empty() && !words.iter().any(|word| subject == word || edge.test.contains(word)) {
                continue;
            }
            let program = edge.executable(&built)?;
            if !listed(&program, &["--exact", edge.test])?.iter().any(|name| name == edge.test) {
                return Err(format!("{} has no test {}", edge.program, edge.test));
            }
            runs.push((*subject, edge, program.clone(), None));
            runs.extend(edge.bugs.iter().map(|bug| (*subject, edge, program.clone(), Some(*bug))));
        }
    }
    let wanted = runs.len();
    let (waiting, faults) = (Mutex::new(runs.into_iter()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                loop {
                    let next = waiting.lock().ok().and_then(|mut runs| runs.next());
                    let Some((subject, edge, program, bug)) = next else { return };
                    let outcome = edge.judge(&program, bug);
                    let with = bug.map(|bug| format!(" with the bug {bug}")).unwrap_or_default();
                    match outcome {
                        Ok(took) => {
                            println!("ok {subject}: {}{with} ({:.1} s)", edge.test, took.as_secs_f32())
                        }
                        Err(why) => {
                            println!("FAILED {subject}: {}{with}: {why}", edge.test);
                            if let Ok(mut faults) = faults.lock() {
                                faults.push(format!("{}{with}", edge.test));
                            }
                        }
                    }
                }
            });
        }
    });
    let faults = faults.into_inner().unwrap_or_default();
    if faults.is_empty() {
        println!("{wanted} runs, each as expected");
        Ok(())
    } else {
        Err(format!("{} of {wanted} runs ended otherwise than expected: {}", faults.len(), faults.join(", ")))
    }
}

impl Edge {
    fn executable(&self, built: &str) -> Result<String> {
        let Some(crate_name) = self.program.strip_prefix("lib ") else {
            return test_program(built, self.program);
        };
        let mark = format!("/deps/{crate_name}-");
        built
            .lines()
            .filter(|line| line.contains("unittests src/lib.rs"))
            .find_map(|line| line.rsplit_once('(')?.1.strip_suffix(')').filter(|path| path.contains(&mark)))
            .map(|path| crate::run::root().join(path).display().to_string())
            .ok_or_else(|| format!("cargo did not print the path of the unit tests of {crate_name}"))
    }

    /// Runs the test once. Without a bug, the test must pass; with one, the test must fail.
    fn judge(&self, program: &str, bug: Option<&str>) -> Result<Duration> {
        let mut command = Command::new(program);
        command.args(["--exact", self.test, "--include-ignored"]).current_dir(self.folder());
        // The output matters only for a run that fails. A file cannot fill up as a pipe does.
        let output = std::env::temp_dir().join(format!(
            "mooncake-edge-{}-{}-{}",
            std::process::id(),
            self.test.replace("::", "-"),
            bug.unwrap_or("none")
        ));
        let file = std::fs::File::create(&output).map_err(|e| format!("{}: {e}", output.display()))?;
        let errors = file.try_clone().map_err(|e| e.to_string())?;
        command.stdin(Stdio::null()).stdout(file).stderr(errors);
        if let Some(bug) = bug {
            command.env("MOONCAKE_PLANTED_BUG", bug);
        }
        let begun = Instant::now();
        let mut child = command.spawn().map_err(|e| format!("cannot start {program}: {e}"))?;
        let status = loop {
            match child.try_wait().map_err(|e| e.to_string())? {
                Some(status) => break Some(status),
                None if begun.elapsed() > LIMIT => {
                    let _ = child.kill();
                    let _ = child.wait();
                    break None;
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let said = std::fs::read(&output).unwrap_or_default();
        let said = String::from_utf8_lossy(&said);
        let _ = std::fs::remove_file(&output);
        match (status, bug) {
            (None, _) => Err(format!("did not end within {} s", LIMIT.as_secs())),
            (Some(status), None) if status.success() && said.contains("1 passed") => Ok(begun.elapsed()),
            (Some(status), None) => Err(format!("{status}\n{said}")),
            // 101 is the exit status of a test program of which a test failed.
            (Some(status), Some(_)) if status.code() == Some(101) && said.contains("1 failed") => {
                Ok(begun.elapsed())
            }
            (Some(status), Some(_)) => Err(format!("the test did not detect it ({status})")),
        }
    }

    /// Returns the folder in which cargo runs the test, which is that of its crate.
    fn folder(&self) -> std::path::PathBuf {
        let root = crate::run::root();
        let holds = |name: &str| {
            let tests = root.join(name).join("tests");
            tests.join(format!("{}.rs", self.program)).exists() || tests.join(self.program).is_dir()
        };
        let of_crate = self.program.strip_prefix("lib ").map(|name| name.replace('_', "-"));
        let crates = std::fs::read_dir(&root).into_iter().flatten().flatten();
        let mut names = crates.filter_map(|entry| entry.file_name().into_string().ok());
        let name = of_crate.or_else(|| names.find(|name| name.starts_with("mooncake-") && holds(name)));
        name.map_or(root, |name| crate::run::crate_folder(&name))
    }
}
