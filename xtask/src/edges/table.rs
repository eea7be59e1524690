//! Tests of rare interleavings, and the planted bugs that each must detect.

use super::edge::Edge;
use super::limits::LIMITS;

/// Tests by subject. A new fix of this kind adds its test and the bug that reverts the fix.
pub(super) const EDGES: &[(&str, &[Edge])] = &[
    (
        "engine upkeep",
        &[
            Edge {
                program: "departed_peers",
                test: "departed_peers_leave_nothing",
                bugs: &["engine-keeps-departed-peers"],
            },
            Edge {
                program: "forgetful_metadata",
                test: "entries_lost_by_an_http_service_are_published_again",
                bugs: &["engine-never-checks-its-entries"],
            },
            Edge {
                program: "calls",
                test: "batches_that_nobody_frees_are_bounded",
                bugs: &["ended-batches-are-kept"],
            },
        ],
    ),
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
                program: "client",
                test: "departures::a_put_is_repeated_when_its_segment_leaves",
                bugs: &["put-fails-with-its-segment"],
            },
            Edge {
                program: "client",
                test: "departures::a_session_continues_elsewhere_when_its_segment_leaves",
                bugs: &["sessions-stay-with-their-segment"],
            },
            Edge {
                program: "client",
                test: "departures::a_put_with_a_lost_end_does_not_bring_back_a_removed_value",
                bugs: &["repeats-puts-with-a-lost-end"],
            },
            Edge {
                program: "client",
                test: "batches::a_batch_that_takes_longer_than_a_lease_renews_it",
                bugs: &["batches-do-not-renew-leases"],
            },
            Edge {
                program: "client",
                test: "batches::each_part_of_a_large_batch_has_the_time_of_an_operation",
                bugs: &["batches-have-one-deadline"],
            },
            Edge {
                program: "client",
                test: "batches::a_look_up_that_takes_longer_than_a_lease_is_made_in_parts",
                bugs: &["late-look-ups-fail-batches"],
            },
            Edge {
                program: "client",
                test: "batches::objects_whose_lease_ended_before_the_read_are_located_again",
                bugs: &["parts-are-of-one-lease"],
            },
            Edge {
                program: "client",
                test: "batches::values_on_disks_are_read_under_short_leases",
                bugs: &["loans-need-the-lease-of-the-master"],
            },
            Edge {
                program: "client",
                test: "batches::reads_wait_for_the_buffers_of_a_disk",
                bugs: &["full-disk-buffers-lose-objects"],
            },
            Edge {
                program: "client",
                test: "prefetches::an_object_is_prefetched_once_in_a_time",
                bugs: &["prefetches-repeat"],
            },
            Edge {
                program: "client",
                test: "prefetches::prefetches_pause_while_memory_is_full",
                bugs: &["prefetches-hurry"],
            },
            Edge {
                program: "client",
                test: "prefetches::a_prefetch_may_be_dropped_at_any_point",
                bugs: &["dropped-prefetches-count"],
            },
            Edge {
                program: "client",
                test: "local::limits::connections_beyond_the_limit_wait_for_others_to_end",
                bugs: &["full-daemons-refuse-at-once"],
            },
            Edge {
                program: "client",
                test: "local::limits::located_objects_end_with_their_leases",
                bugs: &["located-objects-stay"],
            },
            Edge {
                program: "client",
                test: "local::limits::calls_at_the_limit_use_the_connections_of_others",
                bugs: &["permits-end-before-calls"],
            },
            Edge {
                program: "protocol",
                test: "overload::refused_calls_wait_for_their_turn",
                bugs: &["refused-calls-give-up"],
            },
            Edge {
                program: "client",
                test: "local::limits::a_batch_of_any_length_is_read",
                bugs: &["shared-clients-read-once"],
            },
            Edge {
                program: "calls",
                test: "address_resolves_to_allocated_part",
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
    ("limits", LIMITS),
    (
        "B",
        &[
            Edge {
                program: "client",
                test: "sessions::a_dropped_write_is_not_committed",
                bugs: &["session-forgets-dropped-writes"],
            },
            Edge {
                program: "client",
                test: "sessions::an_object_with_holes_is_not_committed",
                bugs: &["session-shows-old-memory"],
            },
            Edge {
                program: "client",
                test: "zeroes::a_put_without_a_write_shows_no_bytes_of_other_tenants",
                bugs: &["old-memory-across-tenants"],
            },
        ],
    ),
    (
        "old-memory",
        &[Edge {
            program: "client",
            test: "old_memory::no_read_returns_bytes_that_its_object_was_not_given",
            bugs: &["session-shows-old-memory"],
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
                program: "master",
                test: "short_leases::a_lease_of_zero_protects_readers_and_not_objects",
                bugs: &["lease-too-short-to-read"],
            },
            Edge {
                program: "master",
                test: "looked_up::look_ups_without_reads_stop_no_writer",
                bugs: &["look-ups-stop-writers"],
            },
            Edge {
                program: "master",
                test: "drain::pinned_and_grouped_objects_are_moved",
                bugs: &["drain-leaves-pinned"],
            },
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
                program: "master",
                test: "write_order::a_snapshot_during_the_end_of_a_batch_loses_no_object",
                bugs: &["stamp-before-lock"],
            },
            Edge {
                program: "master",
                test: "write_order::the_later_write_of_a_key_wins_after_a_restart",
                bugs: &["stamp-before-lock"],
            },
            Edge {
                program: "master",
                test: "snapshots_beside_returns::objects_that_are_handed_over_during_a_snapshot_are_in_it",
                bugs: &["snapshot-forgets-returns"],
            },
            Edge {
                program: "master",
                test: "announced_order::an_announced_value_counts_although_one_on_a_disk_is_promoted",
                bugs: &["promotion-makes-newer"],
            },
            Edge {
                program: "linearizability",
                test: "calls_at_once_have_the_results_of_one_order",
                bugs: &[
                    "stamp-before-lock",
                    "announced-value-confirms-ends",
                    "forget-removals-at-restart",
                    "epochs-unordered",
                    "horizon-ends",
                    "copy-outlives-client",
                    "copy-end-any",
                ],
            },
            Edge {
                program: "master",
                test: "write_order::the_end_of_a_write_of_the_earlier_master_is_refused",
                bugs: &["announced-value-confirms-ends"],
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
                test: "bindings::a_loopback_name_binds_every_port_to_loopback",
                bugs: &["loopback-name-binds-all"],
            },
            Edge {
                program: "processes",
                test: "browsers::pages_of_others_change_nothing_at_a_master",
                bugs: &["pages-of-others", "any-host"],
            },
            Edge {
                program: "processes",
                test: "browsers::pages_of_others_change_nothing_at_a_client",
                bugs: &["pages-of-others", "any-host"],
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
                program: "lib mooncake_transport",
                test: "admission::tests::the_longest_message_goes_when_bytes_exceed_their_limit",
                bugs: &["answer-unbounded"],
            },
            Edge {
                program: "lib mooncake_transport",
                test: "admission::tests::a_message_has_a_minimum_rate",
                bugs: &["transfers-without-a-rate"],
            },
            Edge {
                program: "protocol",
                test: "budgets::unread_responses_stay_within_the_budget",
                bugs: &["answer-unbounded"],
            },
            Edge {
                program: "protocol",
                test: "budgets::half_requests_stay_within_the_budget",
                bugs: &["answer-unbounded"],
            },
            Edge {
                program: "protocol",
                test: "budgets::slow_peers_are_closed",
                bugs: &["transfers-without-a-rate"],
            },
            Edge {
                program: "protocol",
                test: "budgets::a_response_that_is_too_long_is_refused_before_a_lease",
                bugs: &["answer-unbounded"],
            },
            Edge {
                program: "processes",
                test: "hostile::hostile_connections_take_bounded_memory",
                bugs: &["answer-unbounded"],
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
        "copies",
        &[
            Edge {
                program: "master",
                test: "lost_copies::a_copy_ends_with_its_client",
                bugs: &["copy-outlives-client"],
            },
            Edge {
                program: "master",
                test: "lost_copies::a_copy_ends_when_its_client_leaves_or_is_replaced",
                bugs: &["copy-outlives-client"],
            },
            Edge {
                program: "master",
                test: "lost_copies::a_copy_of_an_unknown_client_ends_by_itself",
                bugs: &["copy-outlives-client"],
            },
            Edge {
                program: "master",
                test: "lost_copies::tasks_end_with_their_client",
                bugs: &["copy-outlives-client"],
            },
            Edge {
                program: "master",
                test: "numbered_copies::a_late_end_of_one_copy_ends_no_other",
                bugs: &["copy-end-any"],
            },
            Edge {
                program: "master",
                test: "numbered_copies::the_end_of_a_lost_copy_ends_no_other",
                bugs: &["copy-end-any"],
            },
            Edge {
                program: "master",
                test: "numbered_copies::a_late_end_of_one_promotion_ends_no_other",
                bugs: &["copy-end-any"],
            },
            Edge {
                program: "master",
                test: "numbered_copies::late_reports_of_a_disk_concern_no_later_value",
                bugs: &["copy-end-any"],
            },
            Edge {
                program: "master",
                test: "prefetches::a_prefetched_object_is_in_memory_under_a_lease",
                bugs: &["prefetch-without-lease"],
            },
            Edge {
                program: "master",
                test: "groups::a_large_group_goes_in_steps",
                bugs: &["group-evicts-at-once"],
            },
            Edge {
                program: "master",
                test: "groups::a_put_looks_at_a_part_of_a_protected_group",
                bugs: &["group-walked-at-once"],
            },
            Edge {
                program: "groups",
                test: "look_ups_find_all_of_a_group_or_nothing",
                bugs: &["group-evicted-one-by-one"],
            },
            Edge {
                program: "master",
                test: "removals::a_late_owner_announces_what_the_master_lists",
                bugs: &["late-announcements-refused"],
            },
            Edge {
                program: "master",
                test: "removals::a_client_of_an_earlier_version_hands_memory_over_by_an_unmount",
                bugs: &["earlier-clients-hand-nothing-over"],
            },
            Edge {
                program: "client",
                test: "restart::the_next_process_of_a_segment_file_knows_the_order_of_masters",
                bugs: &["order-not-inherited"],
            },
            Edge {
                program: "master",
                test: "ends_of_reads::space_is_free_once_all_readers_have_ended",
                bugs: &["any-reader-ends-all"],
            },
            Edge {
                program: "client",
                test: "free_space::a_put_that_can_only_be_refused_does_not_wait",
                bugs: &["hopeless-puts-wait", "hopeless-upserts-wait"],
            },
            Edge {
                program: "master",
                test: "removed_on_disks::both_halves_of_an_object_return_in_any_order",
                bugs: &["claim-hides-rest"],
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
                test: "model::what_was_removed_stays_removed_whoever_returns",
                bugs: &["forget-removals-at-restart", "epochs-unordered", "horizon-ends"],
            },
            Edge {
                program: "master",
                test: "removed_on_disks::a_key_that_is_removed_while_a_disk_is_away_does_not_return",
                bugs: &["disk-reports-unchecked"],
            },
            Edge {
                program: "master",
                test: "removals::an_object_that_is_removed_before_its_owner_returns_stays_away",
                bugs: &["forget-removals-at-restart"],
            },
            Edge {
                program: "master",
                test: "removals::a_value_that_was_replaced_under_a_master_between_stays_away",
                bugs: &["epochs-unordered"],
            },
            Edge {
                program: "master",
                test: "removals::a_late_owner_announces_what_the_master_lists",
                bugs: &["horizon-ends"],
            },
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
            test: "closed_gate_has_no_readers",
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
                program: "reserved_pages",
                test: "huge_pages_are_there_or_refused_by_name",
                bugs: &["unreserved-huge-pages"],
            },
            Edge {
                program: "reserved_pages",
                test: "files_on_a_full_file_system_are_refused_with_codes_of_files",
                bugs: &["unfilled-files"],
            },
            Edge {
                program: "client",
                test: "disk::clients_that_are_given_one_folder_each_have_a_disk_there",
                bugs: &["one-worker-per-folder"],
            },
            Edge {
                program: "client",
                test: "local::limits::batches_beyond_the_memory_limit_are_written_in_groups",
                bugs: &["writes-wait-for-whole-batches"],
            },
            Edge {
                program: "lib mooncake_protocol",
                test: "data_message::tests::connections_to_stopped_receivers_are_closed",
                bugs: &["closed-receivers-stay"],
            },
            Edge {
                program: "client",
                test: "local::limits::memory_that_the_host_does_not_have_is_refused",
                bugs: &["promised-memory"],
            },
            Edge {
                program: "lib mooncake_client",
                test: "disk::loan::tests::connections_to_departed_owners_are_closed",
                bugs: &["departed-owners-stay"],
            },
            Edge {
                program: "client",
                test: "local::limits::short_buffers_share_memory_blocks",
                bugs: &["a-block-for-each-buffer"],
            },
            Edge {
                program: "client",
                test: "disk_limits::every_value_on_a_disk_is_read_through_any_buffers",
                bugs: &["longer-than-the-buffer", "whole-values-only"],
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
                test: "secret::tests::recorded_proofs_do_not_hold_again",
                bugs: &["pg-any-proof"],
            },
            Edge {
                program: "lib mooncake_pg",
                test: "link::tests::strangers_are_refused_by_name_where_a_secret_is_set",
                bugs: &["pg-proof-is-optional"],
            },
            Edge {
                program: "lib mooncake_pg",
                test: "control::tests::a_rank_registers_as_what_it_has_proved_to_be",
                bugs: &["pg-rank-is-not-proved"],
            },
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
    (
        "managed weights",
        &[
            Edge {
                program: "master",
                test: "weights::a_lease_keeps_a_revision",
                bugs: &["weights-deleted-under-lease"],
            },
            Edge {
                program: "master",
                test: "weights::objects_of_weights_are_removed_and_replaced_only_with_them",
                bugs: &["weights-removed-like-others"],
            },
            Edge {
                program: "master",
                test: "weights::a_commit_compares_the_objects_with_the_manifest",
                bugs: &["weights-committed-unchecked"],
            },
            Edge {
                program: "master",
                test: "weight_property::random_calls_agree_with_the_model",
                bugs: &[
                    "weights-deleted-under-lease",
                    "weights-removed-like-others",
                    "weights-committed-unchecked",
                ],
            },
        ],
    ),
    (
        "files",
        &[
            Edge {
                program: "private_files",
                test: "a_new_file_is_private_and_an_old_one_becomes_private",
                bugs: &["permissions-follow-umask"],
            },
            Edge {
                program: "private_files",
                test: "files_and_folders_of_another_user_are_refused_by_name",
                bugs: &["other-owners-are-accepted"],
            },
            Edge {
                program: "private_files",
                test: "a_link_in_place_of_a_file_is_refused_and_leads_nowhere",
                bugs: &["links-are-followed"],
            },
            Edge {
                program: "private_files",
                test: "nothing_below_a_folder_is_reached_through_a_link",
                bugs: &["links-are-followed"],
            },
            Edge {
                program: "client",
                test: "files::eviction_removes_no_file_of_others_and_follows_no_link",
                bugs: &["any-name-is-counted"],
            },
            Edge {
                program: "client",
                test: "files::a_file_behind_a_link_is_neither_written_nor_read_nor_removed",
                bugs: &["links-are-followed"],
            },
            Edge {
                program: "client",
                test: "files::the_client_decides_which_folder_a_master_may_name",
                bugs: &["any-folder-is-used"],
            },
        ],
    ),
];
