//! Tests of the limits of listeners and messages, and the planted bugs that each must detect.

use super::edge::Edge;

/// Tests of limits.
pub(super) const LIMITS: &[Edge] = &[
    Edge {
        program: "lib mooncake_protocol",
        test: "data_message::tests::messages_of_closed_connections_count",
        bugs: &["messages-without-space"],
    },
    Edge {
        program: "protocol",
        test: "batches::batches_beyond_the_messages_of_a_client_are_split",
        bugs: &["parts-forget-groups"],
    },
    Edge {
        program: "protocol",
        test: "batches::a_request_that_is_too_long_is_refused_by_name",
        bugs: &["oversized-requests-close"],
    },
    Edge {
        program: "protocol",
        test: "budgets::requests_that_wait_for_a_permit_stay_within_the_budget",
        bugs: &["waiting-requests-stay"],
    },
    Edge {
        program: "operations",
        test: "master_server::a_flood_of_removals_does_not_delay_mounts",
        bugs: &["mounts-wait-for-removals"],
    },
    Edge {
        program: "http_server",
        test: "requests_that_wait_for_a_turn_do_not_fill_a_listener",
        bugs: &["turns-count-as-work"],
    },
    Edge {
        program: "http_server",
        test: "sent_bytes_of_a_streamed_response_are_released",
        bugs: &["sent-bytes-stay"],
    },
];
