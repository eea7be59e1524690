//! Error codes of Mooncake C++, with meaning, cause and cure: one table for the protocol, for
//! messages and for `docs/errors.md`.

use crate::kind::ErrorKind;

macro_rules! codes {
    ($($variant:ident = $number:literal, $name:literal, $kind:ident,
        $meaning:literal, $cause:literal, $cure:literal;)*) => {
        /// Error code of Mooncake C++, as on the wire and in Python (where success is 0).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum ErrorCode {
            $(#[doc = concat!($meaning, " (`", $name, "`, ", stringify!($number), ")")] $variant,)*
            /// Number unknown to this version, kept as received.
            Other(i32),
        }

        impl ErrorCode {
            /// Every code with a name.
            pub const ALL: &'static [ErrorCode] = &[$(ErrorCode::$variant,)*];

            /// Returns the number on the wire.
            pub const fn number(self) -> i32 {
                match self {
                    $(ErrorCode::$variant => $number,)*
                    ErrorCode::Other(number) => number,
                }
            }

            /// Returns the code of `number`, or [`ErrorCode::Other`] for an unknown one.
            pub const fn from_number(number: i32) -> Self {
                match number {
                    $($number => ErrorCode::$variant,)*
                    other => ErrorCode::Other(other),
                }
            }

            /// Returns the name in Mooncake C++.
            pub const fn name(self) -> &'static str {
                match self {
                    $(ErrorCode::$variant => $name,)*
                    ErrorCode::Other(_) => "UNKNOWN",
                }
            }

            /// Returns the kind, which tells callers how to proceed.
            pub const fn kind(self) -> ErrorKind {
                match self {
                    $(ErrorCode::$variant => ErrorKind::$kind,)*
                    ErrorCode::Other(_) => ErrorKind::Internal,
                }
            }

            /// Returns the meaning in a few words.
            pub const fn meaning(self) -> &'static str {
                match self {
                    $(ErrorCode::$variant => $meaning,)*
                    ErrorCode::Other(_) => "unknown error code",
                }
            }

            /// Returns the usual cause in one sentence.
            pub const fn cause(self) -> &'static str {
                match self {
                    $(ErrorCode::$variant => $cause,)*
                    ErrorCode::Other(_) => "The peer has a newer version.",
                }
            }

            /// Returns the recommended action of the caller or the operator in one sentence.
            pub const fn cure(self) -> &'static str {
                match self {
                    $(ErrorCode::$variant => $cure,)*
                    ErrorCode::Other(_) => "Upgrade this side.",
                }
            }
        }
    };
}

codes! {
    InternalError = -1, "INTERNAL_ERROR", Internal,
        "an internal error occurred",
        "A bug, or a failure of the machine.",
        "Report it with the message and the log of both sides.";
    BufferOverflow = -10, "BUFFER_OVERFLOW", NoSpace,
        "a buffer is too small",
        "The local buffer or the pool of page-locked memory is exhausted.",
        "Set a larger `local_buffer_size`, or keep fewer calls in flight.";
    ShardIndexOutOfRange = -100, "SHARD_INDEX_OUT_OF_RANGE", Invalid,
        "no such shard",
        "Mooncake C++ only: a shard number beyond the last shard.",
        "Report it to Mooncake C++.";
    SegmentNotFound = -101, "SEGMENT_NOT_FOUND", NotFound,
        "no such segment",
        "The segment was never mounted, was unmounted, or its client expired.",
        "Check the name with `mooncake status`; mount the segment again.";
    SegmentAlreadyExists = -102, "SEGMENT_ALREADY_EXISTS", AlreadyExists,
        "the segment is mounted with other data",
        "The same id, memory or engine name is in use with other data.",
        "Unmount the first segment, or choose another name.";
    ClientNotFound = -103, "CLIENT_NOT_FOUND", NotFound,
        "no such client",
        "Mooncake C++ only: the master does not know the client.",
        "Mount the segments of the client again.";
    NoAvailableHandle = -200, "NO_AVAILABLE_HANDLE", NoSpace,
        "no segment has space for it now",
        "Memory is full and nothing may be evicted: leases or pins hold the objects.",
        "Add segments, use fewer replicas or pins, or store smaller values.";
    InvalidVersion = -300, "INVALID_VERSION", VersionMismatch,
        "the versions of client and master differ",
        "Client and master speak different versions of the protocol.",
        "Upgrade the older side; the message names both versions.";
    InvalidKey = -400, "INVALID_KEY", Invalid,
        "the key is not usable",
        "Mooncake C++ only: the key is not accepted. This project returns -600.",
        "Use a non-empty key.";
    WriteFail = -500, "WRITE_FAIL", Internal,
        "a local write failed",
        "Mooncake C++ only: a copy in local memory failed.",
        "Check the log of the client.";
    InvalidParams = -600, "INVALID_PARAMS", Invalid,
        "an argument is wrong",
        "An argument is out of range, memory is not registered, or the store is not set up.",
        "Read the message, which names the argument; correct the call.";
    IllegalClient = -601, "ILLEGAL_CLIENT", Invalid,
        "another client owns it",
        "The call names a segment, a copy or a task of another client.",
        "Make the call from the client that owns the resource.";
    InvalidWrite = -700, "INVALID_WRITE", Invalid,
        "no write of it is in progress",
        "The write ended, was revoked, or its allocation expired.",
        "Put the object again.";
    InvalidRead = -701, "INVALID_READ", Invalid,
        "the read is not valid",
        "Mooncake C++ only: the read does not match the object.",
        "Check the offset and the length.";
    InvalidReplica = -702, "INVALID_REPLICA", NotFound,
        "no usable replica",
        "The object has no replica that this kind of read can use.",
        "Read the whole object, or recompute it.";
    ReplicaIsNotReady = -703, "REPLICA_IS_NOT_READY", Busy,
        "no replica is readable yet",
        "The object exists, and its first write has not ended.",
        "Retry after the put has ended.";
    ObjectNotFound = -704, "OBJECT_NOT_FOUND", NotFound,
        "no such object",
        "The key was never put, or the object was evicted, removed or lost with its client.",
        "Treat it as a miss.";
    ObjectAlreadyExists = -705, "OBJECT_ALREADY_EXISTS", AlreadyExists,
        "the object exists",
        "Another put stored the key, or is storing it.",
        "Nothing; use upsert to replace the value.";
    ObjectHasLease = -706, "OBJECT_HAS_LEASE", Busy,
        "a reader holds a lease on it",
        "A reader received the replicas less than `--default_kv_lease_ttl` ago.",
        "Retry after the lease has ended, or remove with force.";
    LeaseExpired = -707, "LEASE_EXPIRED", Expired,
        "the lease ended before the last byte arrived",
        "The network or the reader was slow, or a disk value was replaced during the read.",
        "Read again; set a longer `--default_kv_lease_ttl` if it recurs.";
    ObjectHasReplicationTask = -708, "OBJECT_HAS_REPLICATION_TASK", Busy,
        "a copy or a move of it is in progress",
        "A copy, a move or a drain job holds the object.",
        "Retry when the task has ended.";
    ObjectNoReplicationTask = -709, "OBJECT_NO_REPLICATION_TASK", NotFound,
        "no copy or move of it is in progress",
        "The task ended, was cancelled or timed out.",
        "Start the task again.";
    ReplicaNotFound = -710, "REPLICA_NOT_FOUND", NotFound,
        "no such replica",
        "The replica is gone, or it lies in another segment.",
        "List the replicas again.";
    ReplicaAlreadyExists = -711, "REPLICA_ALREADY_EXISTS", AlreadyExists,
        "the replica exists",
        "Mooncake C++ only: the target segment has a replica.",
        "Choose another target.";
    ReplicaIsGone = -712, "REPLICA_IS_GONE", NotFound,
        "the replica is gone",
        "The client, the source or every target of the copy was lost meanwhile.",
        "Start the copy again.";
    ReplicaNotInLocalMemory = -713, "REPLICA_NOT_IN_LOCAL_MEMORY", Unavailable,
        "the replica is not in this process",
        "The client does not hold the bytes that it is to copy.",
        "Start the task at the client that holds the replica.";
    ObjectReplicaBusy = -714, "OBJECT_REPLICA_BUSY", Busy,
        "a replica or a buffer of it is in use",
        "A transfer, a write or a copy uses it.",
        "Wait for the transfer, then retry.";
    PromotionAlreadyExists = -715, "PROMOTION_ALREADY_EXISTS", AlreadyExists,
        "the object is in memory or returns there already",
        "A replica in memory or a promotion of the object exists.",
        "Nothing; read the object.";
    TransferFail = -800, "TRANSFER_FAIL", Unavailable,
        "the bytes could not be transferred",
        "The peer died, closed the connection or cannot be reached.",
        "Run `mooncake doctor`; check the ports between the nodes.";
    ChecksumMismatch = -801, "CHECKSUM_MISMATCH", Corrupt,
        "the checksum of the bytes does not match",
        "The bytes read differ from the bytes written.",
        "Recompute the value; check the memory and the disk of the owner.";
    RpcFail = -900, "RPC_FAIL", Unavailable,
        "the master cannot be reached",
        "No master listens at the address, or the connection broke.",
        "Check the address; run `mooncake doctor`.";
    RpcTimeout = -901, "RPC_TIMEOUT", Timeout,
        "the master did not respond in time",
        "The master is overloaded, stopped or cut off.",
        "Retry; check the load of the master and the network.";
    EtcdOperationError = -1000, "ETCD_OPERATION_ERROR", Unavailable,
        "an etcd operation failed",
        "Mooncake C++ only: etcd returned an error.",
        "Check the etcd cluster.";
    EtcdKeyNotExist = -1001, "ETCD_KEY_NOT_EXIST", NotFound,
        "etcd has no such key",
        "Mooncake C++ only: the key is absent from etcd.",
        "Check the cluster id.";
    EtcdTransactionFail = -1002, "ETCD_TRANSACTION_FAIL", Busy,
        "an etcd transaction conflicted with another",
        "Mooncake C++ only: another writer changed the key.",
        "Retry.";
    EtcdCtxCancelled = -1003, "ETCD_CTX_CANCELLED", Unavailable,
        "an etcd call was cancelled",
        "Mooncake C++ only: the etcd client is shutting down.",
        "Retry with a new client.";
    OplogEntryNotFound = -1004, "OPLOG_ENTRY_NOT_FOUND", NotFound,
        "the oplog has no such entry",
        "Mooncake C++ only: the entry was truncated.",
        "Restart the standby from a snapshot.";
    K8sLeaseOperationError = -1005, "K8S_LEASE_OPERATION_ERROR", Unavailable,
        "a Kubernetes lease operation failed",
        "Mooncake C++ only: the Kubernetes API returned an error.",
        "Check the permissions on leases.";
    K8sLeaseNotFound = -1006, "K8S_LEASE_NOT_FOUND", NotFound,
        "the Kubernetes lease does not exist",
        "Mooncake C++ only: the lease object is absent.",
        "Check the namespace and the name.";
    IncompleteOplogCatchUp = -1007, "INCOMPLETE_OPLOG_CATCH_UP", Busy,
        "the standby has not caught up with the oplog",
        "Mooncake C++ only: the standby lags behind the leader.",
        "Wait, then retry.";
    UnavailableInCurrentStatus = -1010, "UNAVAILABLE_IN_CURRENT_STATUS", Unavailable,
        "not possible in the current state",
        "The job, session or client is in a state that does not allow the call.",
        "Read the message, which names the state; retry later.";
    UnavailableInCurrentMode = -1011, "UNAVAILABLE_IN_CURRENT_MODE", Unavailable,
        "not possible in the current mode",
        "The feature of the call is off, such as tenants without `--enable_multi_tenants`.",
        "Start the master with the flag of the feature.";
    NotSupported = -1012, "NOT_SUPPORTED", Unsupported,
        "not supported",
        "The build or the peer lacks the feature.",
        "Build with the feature that the message names, or upgrade the peer.";
    FileNotFound = -1100, "FILE_NOT_FOUND", NotFound,
        "the file does not exist",
        "A file or a device that the configuration names is missing.",
        "Check the path in the message.";
    FileOpenFail = -1101, "FILE_OPEN_FAIL", Internal,
        "the file cannot be opened",
        "The path is missing, or permissions or descriptors do not suffice.",
        "Check permissions and `ulimit -n`.";
    FileReadFail = -1102, "FILE_READ_FAIL", Internal,
        "the file cannot be read",
        "The disk or the file system returned an error.",
        "Check the kernel log and the disk.";
    FileWriteFail = -1103, "FILE_WRITE_FAIL", Internal,
        "the file cannot be written",
        "The disk is full, read-only or broken.",
        "Free space; check the disk.";
    FileInvalidBuffer = -1104, "FILE_INVALID_BUFFER", Invalid,
        "the buffer of a file operation is not valid",
        "Mooncake C++ only: the buffer is null or not aligned.",
        "Report it to Mooncake C++.";
    FileLockFail = -1105, "FILE_LOCK_FAIL", Busy,
        "the file is locked",
        "Another process uses the directory, the segment file or the database.",
        "Stop the other process, or choose another path.";
    FileInvalidHandle = -1106, "FILE_INVALID_HANDLE", Invalid,
        "the file handle is not valid",
        "Mooncake C++ only: the file is closed.",
        "Report it to Mooncake C++.";
    BucketNotFound = -1200, "BUCKET_NOT_FOUND", NotFound,
        "the bucket does not exist",
        "Mooncake C++ only: the SSD store has no such bucket.",
        "Treat it as a miss.";
    BucketAlreadyExists = -1201, "BUCKET_ALREADY_EXISTS", AlreadyExists,
        "the bucket exists",
        "Mooncake C++ only: the bucket was written before.",
        "Nothing.";
    KeysExceedBucketLimit = -1202, "KEYS_EXCEED_BUCKET_LIMIT", NoSpace,
        "a bucket has too many keys",
        "Mooncake C++ only: `MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT` is reached.",
        "Raise the limit.";
    KeysUltraLimit = -1203, "KEYS_ULTRA_LIMIT", NoSpace,
        "the store has too many keys",
        "Mooncake C++ only: the limit of keys on the disk is reached.",
        "Raise the limit.";
    UnableOffload = -1300, "UNABLE_OFFLOAD", Unsupported,
        "offloading to disk is not enabled",
        "The master runs without `--enable_offload`, or the client has no disk.",
        "Start the master with `--enable_offload=true`; configure a disk.";
    UnableOffloading = -1301, "UNABLE_OFFLOADING", Busy,
        "offloading to disk is not possible now",
        "Mooncake C++ only: the disk is busy or full.",
        "Retry later.";
    TaskNotFound = -1400, "TASK_NOT_FOUND", NotFound,
        "no such task",
        "The task ended long ago, or the id is wrong.",
        "Check the id; start a new task.";
    TaskPendingLimitExceeded = -1401, "TASK_PENDING_LIMIT_EXCEEDED", NoSpace,
        "too many tasks are pending",
        "The queue of tasks is at its limit.",
        "Wait until pending tasks have ended.";
    JobNotFound = -1402, "JOB_NOT_FOUND", NotFound,
        "no such job",
        "The drain job does not exist.",
        "Check the id; create the job again with `POST /api/v1/drain_jobs`.";
    SerializeUnsupported = -1500, "SERIALIZE_UNSUPPORTED", Unsupported,
        "the value cannot be serialized",
        "Mooncake C++ only: the type has no serialization.",
        "Report it to Mooncake C++.";
    SerializeFail = -1501, "SERIALIZE_FAIL", Internal,
        "serialization failed",
        "Mooncake C++ only: encoding a snapshot failed.",
        "Check the log of the master.";
    DeserializeFail = -1502, "DESERIALIZE_FAIL", Corrupt,
        "the data cannot be decoded",
        "Stored or received data is malformed or truncated.",
        "Check the versions of both sides; restore the file from a backup.";
    PersistentFail = -1503, "PERSISTENT_FAIL", Internal,
        "the data cannot be persisted",
        "The database or the snapshot folder refused the write.",
        "Check free space and permissions of the path in the message.";
    DfsNetworkTimeout = -1600, "DFS_NETWORK_TIMEOUT", Timeout,
        "the shared file system did not respond in time",
        "Mooncake C++ only: the network of the file system is slow.",
        "Retry; check the file system.";
    DfsServiceUnavailable = -1601, "DFS_SERVICE_UNAVAILABLE", Unavailable,
        "shared files are not available",
        "A put asks for replicas in files, and no file system is configured for that.",
        "Ask for memory replicas; start the master with `--root_fs_dir` for files.";
    DfsQuotaExceeded = -1602, "DFS_QUOTA_EXCEEDED", NoSpace,
        "the quota of the shared file system is exhausted",
        "Mooncake C++ only: the file system is full.",
        "Free space, or raise the quota.";
    DfsPermissionDenied = -1603, "DFS_PERMISSION_DENIED", Invalid,
        "the shared file system denies access",
        "Mooncake C++ only: the process lacks permissions.",
        "Check the owner and the mode of the folder.";
    DfsStaleHandle = -1604, "DFS_STALE_HANDLE", Unavailable,
        "a handle of the shared file system is stale",
        "Mooncake C++ only: the server forgot the handle.",
        "Retry; mount the file system again.";
    DfsPartialWrite = -1605, "DFS_PARTIAL_WRITE", Corrupt,
        "the shared file was written in part",
        "Mooncake C++ only: the write ended early.",
        "Put the object again.";
    TenantQuotaExceeded = -1700, "TENANT_QUOTA_EXCEEDED", NoSpace,
        "the quota of the tenant is exhausted",
        "The objects of the tenant take its whole quota, and none may be evicted.",
        "Raise the quota, or remove objects of the tenant.";
    TenantNotRegistered = -1701, "TENANT_NOT_REGISTERED", NotFound,
        "the tenant is not registered",
        "The tenant policy does not contain the tenant.",
        "Register it with `PUT /api/v1/tenant_quotas`.";
    TenantNotEmpty = -1702, "TENANT_NOT_EMPTY", Busy,
        "the tenant has objects",
        "A tenant with objects cannot be deleted.",
        "Remove its objects first.";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_comes_back_and_none_is_taken_twice() {
        let mut seen = std::collections::HashSet::new();
        for &code in ErrorCode::ALL {
            assert!(code.number() < 0, "{code:?}");
            assert_eq!(ErrorCode::from_number(code.number()), code);
            assert!(seen.insert(code.number()), "{code:?} shares its number");
            assert!(!code.name().is_empty() && !code.meaning().is_empty());
            for sentence in [code.cause(), code.cure()] {
                assert!(sentence.ends_with('.') && !sentence.contains('|'), "{code:?}: {sentence}");
            }
        }
        assert_eq!(ErrorCode::from_number(-424_242).number(), -424_242);
    }

    #[test]
    fn numbers_users_match_on() {
        for (code, number) in [
            (ErrorCode::NoAvailableHandle, -200),
            (ErrorCode::InvalidParams, -600),
            (ErrorCode::ObjectNotFound, -704),
            (ErrorCode::ObjectAlreadyExists, -705),
            (ErrorCode::ObjectHasLease, -706),
            (ErrorCode::LeaseExpired, -707),
            (ErrorCode::TransferFail, -800),
            (ErrorCode::RpcFail, -900),
        ] {
            assert_eq!(code.number(), number);
        }
    }
}
