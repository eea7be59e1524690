//! The existing system's error numbers, one table for both directions.

use crate::error::ErrorKind;

macro_rules! codes {
    ($($variant:ident = $number:literal, $name:literal, $kind:ident, $meaning:literal;)*) => {
        /// A number of the existing system, as it appears on the wire and in Python (where success is 0).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum ErrorCode {
            $(#[doc = concat!($meaning, " (`", $name, "`, ", stringify!($number), ")")] $variant,)*
            /// A number this version does not know, kept as it came.
            Other(i32),
        }

        impl ErrorCode {
            /// Every code with a name.
            pub const ALL: &'static [ErrorCode] = &[$(ErrorCode::$variant,)*];

            /// The number.
            pub const fn number(self) -> i32 {
                match self {
                    $(ErrorCode::$variant => $number,)*
                    ErrorCode::Other(number) => number,
                }
            }

            /// The code of a number; an unknown one is kept in [`ErrorCode::Other`].
            pub const fn from_number(number: i32) -> Self {
                match number {
                    $($number => ErrorCode::$variant,)*
                    other => ErrorCode::Other(other),
                }
            }

            /// The existing system's name for it.
            pub const fn name(self) -> &'static str {
                match self {
                    $(ErrorCode::$variant => $name,)*
                    ErrorCode::Other(_) => "UNKNOWN",
                }
            }

            /// What the caller does next.
            pub const fn kind(self) -> ErrorKind {
                match self {
                    $(ErrorCode::$variant => ErrorKind::$kind,)*
                    ErrorCode::Other(_) => ErrorKind::Internal,
                }
            }

            /// What it means, in a few words.
            pub const fn meaning(self) -> &'static str {
                match self {
                    $(ErrorCode::$variant => $meaning,)*
                    ErrorCode::Other(_) => "an error number this version does not know",
                }
            }
        }
    };
}

codes! {
    InternalError = -1, "INTERNAL_ERROR", Internal, "something unexpected happened inside";
    BufferOverflow = -10, "BUFFER_OVERFLOW", NoSpace, "a buffer is too small";
    ShardIndexOutOfRange = -100, "SHARD_INDEX_OUT_OF_RANGE", Invalid, "no such shard";
    SegmentNotFound = -101, "SEGMENT_NOT_FOUND", NotFound, "no such segment";
    SegmentAlreadyExists = -102, "SEGMENT_ALREADY_EXISTS", AlreadyExists, "the segment is mounted with other data";
    ClientNotFound = -103, "CLIENT_NOT_FOUND", NotFound, "no such client";
    NoAvailableHandle = -200, "NO_AVAILABLE_HANDLE", NoSpace, "no segment has room for it now";
    InvalidVersion = -300, "INVALID_VERSION", VersionMismatch, "client and master do not speak the same version";
    InvalidKey = -400, "INVALID_KEY", Invalid, "not a usable key";
    WriteFail = -500, "WRITE_FAIL", Internal, "a local write failed";
    InvalidParams = -600, "INVALID_PARAMS", Invalid, "an argument is wrong";
    IllegalClient = -601, "ILLEGAL_CLIENT", Invalid, "another client owns this";
    InvalidWrite = -700, "INVALID_WRITE", Invalid, "no write is in progress for it";
    InvalidRead = -701, "INVALID_READ", Invalid, "the read makes no sense";
    InvalidReplica = -702, "INVALID_REPLICA", NotFound, "no usable replica";
    ReplicaIsNotReady = -703, "REPLICA_IS_NOT_READY", Busy, "it exists but no replica is readable yet";
    ObjectNotFound = -704, "OBJECT_NOT_FOUND", NotFound, "no such object";
    ObjectAlreadyExists = -705, "OBJECT_ALREADY_EXISTS", AlreadyExists, "the object exists";
    ObjectHasLease = -706, "OBJECT_HAS_LEASE", Busy, "a reader holds a lease on it";
    LeaseExpired = -707, "LEASE_EXPIRED", Expired, "the lease ran out before the last byte arrived";
    ObjectHasReplicationTask = -708, "OBJECT_HAS_REPLICATION_TASK", Busy, "a copy or move of it is under way";
    ObjectNoReplicationTask = -709, "OBJECT_NO_REPLICATION_TASK", NotFound, "no copy or move of it is under way";
    ReplicaNotFound = -710, "REPLICA_NOT_FOUND", NotFound, "no such replica";
    ReplicaAlreadyExists = -711, "REPLICA_ALREADY_EXISTS", AlreadyExists, "the replica exists";
    ReplicaIsGone = -712, "REPLICA_IS_GONE", NotFound, "the replica is gone";
    ReplicaNotInLocalMemory = -713, "REPLICA_NOT_IN_LOCAL_MEMORY", Unavailable, "the replica is not in this process";
    ObjectReplicaBusy = -714, "OBJECT_REPLICA_BUSY", Busy, "a replica of it is in use";
    TransferFail = -800, "TRANSFER_FAIL", Unavailable, "the bytes could not be moved";
    ChecksumMismatch = -801, "CHECKSUM_MISMATCH", Corrupt, "the bytes are not the ones written";
    RpcFail = -900, "RPC_FAIL", Unavailable, "the master could not be asked";
    RpcTimeout = -901, "RPC_TIMEOUT", Timeout, "the master did not answer in time";
    EtcdOperationError = -1000, "ETCD_OPERATION_ERROR", Unavailable, "etcd failed";
    EtcdKeyNotExist = -1001, "ETCD_KEY_NOT_EXIST", NotFound, "etcd has no such key";
    EtcdTransactionFail = -1002, "ETCD_TRANSACTION_FAIL", Busy, "an etcd transaction lost a race";
    EtcdCtxCancelled = -1003, "ETCD_CTX_CANCELLED", Unavailable, "an etcd call was cancelled";
    OplogEntryNotFound = -1004, "OPLOG_ENTRY_NOT_FOUND", NotFound, "oplog entry not found";
    K8sLeaseOperationError = -1005, "K8S_LEASE_OPERATION_ERROR", Unavailable, "k8s lease operation error";
    K8sLeaseNotFound = -1006, "K8S_LEASE_NOT_FOUND", NotFound, "k8s lease not found";
    IncompleteOplogCatchUp = -1007, "INCOMPLETE_OPLOG_CATCH_UP", Busy, "incomplete oplog catch up";
    UnavailableInCurrentStatus = -1010, "UNAVAILABLE_IN_CURRENT_STATUS", Unavailable, "not possible in its present state";
    UnavailableInCurrentMode = -1011, "UNAVAILABLE_IN_CURRENT_MODE", Unavailable, "not possible in this mode";
    NotSupported = -1012, "NOT_SUPPORTED", Unsupported, "not supported";
    FileNotFound = -1100, "FILE_NOT_FOUND", NotFound, "file not found";
    FileOpenFail = -1101, "FILE_OPEN_FAIL", Internal, "file open fail";
    FileReadFail = -1102, "FILE_READ_FAIL", Internal, "file read fail";
    FileWriteFail = -1103, "FILE_WRITE_FAIL", Internal, "file write fail";
    FileInvalidBuffer = -1104, "FILE_INVALID_BUFFER", Invalid, "file invalid buffer";
    FileLockFail = -1105, "FILE_LOCK_FAIL", Busy, "file lock fail";
    FileInvalidHandle = -1106, "FILE_INVALID_HANDLE", Invalid, "file invalid handle";
    BucketNotFound = -1200, "BUCKET_NOT_FOUND", NotFound, "bucket not found";
    BucketAlreadyExists = -1201, "BUCKET_ALREADY_EXISTS", AlreadyExists, "bucket already exists";
    KeysExceedBucketLimit = -1202, "KEYS_EXCEED_BUCKET_LIMIT", NoSpace, "keys exceed bucket limit";
    KeysUltraLimit = -1203, "KEYS_ULTRA_LIMIT", NoSpace, "keys ultra limit";
    UnableOffload = -1300, "UNABLE_OFFLOAD", Unsupported, "unable offload";
    UnableOffloading = -1301, "UNABLE_OFFLOADING", Busy, "unable offloading";
    TaskNotFound = -1400, "TASK_NOT_FOUND", NotFound, "task not found";
    TaskPendingLimitExceeded = -1401, "TASK_PENDING_LIMIT_EXCEEDED", NoSpace, "task pending limit exceeded";
    JobNotFound = -1402, "JOB_NOT_FOUND", NotFound, "job not found";
    SerializeUnsupported = -1500, "SERIALIZE_UNSUPPORTED", Unsupported, "serialize unsupported";
    SerializeFail = -1501, "SERIALIZE_FAIL", Internal, "serialize fail";
    DeserializeFail = -1502, "DESERIALIZE_FAIL", Corrupt, "deserialize fail";
    PersistentFail = -1503, "PERSISTENT_FAIL", Internal, "persistent fail";
    DfsNetworkTimeout = -1600, "DFS_NETWORK_TIMEOUT", Timeout, "dfs network timeout";
    DfsServiceUnavailable = -1601, "DFS_SERVICE_UNAVAILABLE", Unavailable, "dfs service unavailable";
    DfsQuotaExceeded = -1602, "DFS_QUOTA_EXCEEDED", NoSpace, "dfs quota exceeded";
    DfsPermissionDenied = -1603, "DFS_PERMISSION_DENIED", Invalid, "dfs permission denied";
    DfsStaleHandle = -1604, "DFS_STALE_HANDLE", Unavailable, "dfs stale handle";
    DfsPartialWrite = -1605, "DFS_PARTIAL_WRITE", Corrupt, "dfs partial write";
    TenantQuotaExceeded = -1700, "TENANT_QUOTA_EXCEEDED", NoSpace, "tenant quota exceeded";
    TenantNotRegistered = -1701, "TENANT_NOT_REGISTERED", NotFound, "tenant not registered";
    TenantNotEmpty = -1702, "TENANT_NOT_EMPTY", Busy, "tenant not empty";
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
