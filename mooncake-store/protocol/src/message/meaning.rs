//! Documentation of the arguments of calls.

/// Documentation of each argument, so that an argument has the same meaning in every call.
macro_rules! meaning {
    (endpoint) => {
        "Endpoint of the node."
    };
    (key) => {
        "Key of the object."
    };
    (keys) => {
        "Keys of the objects."
    };
    (position) => {
        "Position to continue from, from the earlier page; 0 for the first page."
    };
    (reader) => {
        "Identity that the reader has drawn at random."
    };
    (number) => {
        "Number of the read; later reads have larger ones."
    };
    (ended) => {
        "Number up to which all reads of the reader have ended."
    };
    (with_replicas) => {
        "Whether the response contains the replicas of the objects."
    };
    (tenant) => {
        "Tenant of the objects; `default` if the cluster has no tenants."
    };
    (client) => {
        "Client that makes the call."
    };
    (clients) => {
        "Requested clients."
    };
    (pattern) => {
        "Regular expression that matches any part of a key."
    };
    (force) => {
        "Whether to ignore leases."
    };
    (policy) => {
        "Choice of the objects that the call grants leases on."
    };
    (size) => {
        "Length of the object in bytes."
    };
    (sizes) => {
        "Length of each object in bytes."
    };
    (config) => {
        "Placement and pinning of the objects."
    };
    (located) => {
        "Number of a replica of each object, from the earlier response."
    };
    (hints) => {
        "Hints about the objects."
    };
    (lifetimes) => {
        "Lifetimes of those objects that end by themselves."
    };
    (item) => {
        "Object with its checksum."
    };
    (items) => {
        "Objects with their checksums."
    };
    (attempt) => {
        "Number of the write or copy, drawn at random for each start."
    };
    (work) => {
        "Number of the last response with work that the client received; 0 for objects that it found."
    };
    (relocates) => {
        "Whether objects whose leases have ended are located again."
    };
    (replace) => {
        "Whether the write is an upsert."
    };
    (replicas) => {
        "Type of the affected replicas."
    };
    (replica) => {
        "Number of the replica."
    };
    (replica_ids) => {
        "Number of the replica of each object."
    };
    (resolved_tenant) => {
        "Tenant of the objects, if it is not the one of the request."
    };
    (instance) => {
        "Identity of the process of the client."
    };
    (again) => {
        "Whether an outcome that is known does not count."
    };
    (held) => {
        "Objects of earlier masters that the client will announce, if the form of their keys is known."
    };
    (segment) => {
        "Segment of the call."
    };
    (segments) => {
        "Segments of the call."
    };
    (segment_name) => {
        "Name of the segment; empty for all."
    };
    (grace_ms) => {
        "Time in milliseconds for which the objects stay readable."
    };
    (limit) => {
        "Maximum number of tasks."
    };
    (source) => {
        "Name of the segment to read from."
    };
    (target) => {
        "Name of the segment to write to."
    };
    (targets) => {
        "Names of the segments to write to."
    };
    (task) => {
        "Number of the task."
    };
    (after) => {
        "Number of the last received change; 0 for none."
    };
    (offsets) => {
        "Offset of each object in bytes."
    };
    (lengths) => {
        "Length of each object in bytes."
    };
    (begin) => {
        "Whether this is the first request; a report of the surviving objects follows."
    };
    (done) => {
        "Number of the last response that the client has completed."
    };
    (zeroed) => {
        "Numbers of the requests that the client has completed."
    };
    (starts) => {
        "Offset in each object in bytes."
    };
    (counts) => {
        "Length of each part in bytes."
    };
    (open) => {
        "Whether this is the last call."
    };
    (promise_ms) => {
        "Longest time, in milliseconds, for which leases or grants of earlier masters may still hold."
    };
    (stored) => {
        "Objects whose bytes are unchanged."
    };
    (report) => {
        "Outcome of the task."
    };
    (lease) => {
        "Identity of the copy of a hot object; nil for an ordinary copy."
    };
    (epochs) => {
        "Pairs of masters, each in the order in which they led."
    };
    (epoch) => {
        "Version of the value, from the task."
    };
    (enabled) => {
        "Whether the client's disk accepts objects."
    };
    (offloaded) => {
        "Objects written to disk."
    };
    (places) => {
        "Location of each object."
    };
    (bytes) => {
        "Capacity of the client's disk in bytes."
    };
    (batch) => {
        "Number of the loan."
    };
    (preferred) => {
        "Names of the preferred segments."
    };
    (nof_segment) => {
        "NVMe-oF target."
    };
    (nof_segments) => {
        "NVMe-oF targets."
    };
    (guest) => {
        "IPC client that makes the call."
    };
    (memory) => {
        "Number of the memory block, chosen by its IPC client."
    };
    (offset) => {
        "Offset of the first byte in the file."
    };
    (len) => {
        "Length in bytes."
    };
    (objects) => {
        "Objects with their memory."
    };
    (ranges) => {
        "Ranges of located objects, with their memory."
    };
    (import) => {
        "Revision to import, and the objects to expect."
    };
    (commit) => {
        "Imported revision, and its objects."
    };
    (change) => {
        "Revision to change."
    };
    (query) => {
        "Requested revision."
    };
    (list) => {
        "Requested revisions."
    };
    (request) => {
        "Requested lease."
    };
    (renewal) => {
        "Lease to extend."
    };
    (release) => {
        "Lease to end."
    };
    (movement) => {
        "Revision to move, and the destination."
    };
    (operation) => {
        "Requested move."
    };
    (into) => {
        "Memory that receives the value."
    };
}
