//! Types of the calls about managed weights, as in Mooncake C++ 0.3.14.
//!
//! A revision of weights is a group of objects that is imported, read and removed as a whole. The
//! master keeps a record of each revision, and leases of its readers.

use std::fmt;

use super::known;
use crate::pack::{Byte, Numbered, wire_fields, written_as};

wire_struct! {
    /// Identity of a revision of weights.
    #[derive(Default, Hash, PartialOrd, Ord)]
    pub struct WeightId {
        /// Tenant of the objects; a master without tenants replaces it by `default`.
        pub tenant: String,
        /// Namespace of the resource.
        pub namespace: String,
        /// Name of the weights, such as that of a model.
        pub resource: String,
        /// Name of the revision.
        pub revision: String,
        /// Number of the attempt to import the revision, above 0.
        pub generation: u64,
    }
}

wire_struct! {
    /// Objects of a revision.
    #[derive(Default)]
    pub struct WeightManifest {
        /// Key of the manifest; empty until the commit.
        pub manifest_key: String,
        /// SHA-256 of the manifest in lower-case hexadecimal. The master does not compare it: it
        /// never reads objects.
        pub sha256: String,
        /// Name of the group of the objects.
        pub group: String,
        /// Digest of the sorted keys of the payloads.
        pub keys_sha256: String,
        /// Number of payloads. The manifest is none.
        pub payloads: u64,
        /// Size of all payloads in bytes.
        pub bytes: u64,
    }
}

wire_struct! {
    /// Record of a revision.
    pub struct WeightRevision {
        /// Identity of the revision.
        pub id: WeightId,
        /// Objects of the revision.
        pub manifest: WeightManifest,
        /// Availability of the objects.
        pub availability: WeightAvailability,
        /// Location of the objects.
        pub residency: WeightResidency,
        /// Kind of the move in progress.
        pub operation: WeightMove,
        /// Number of the move in progress; 0 for none.
        pub operation_id: u64,
        /// Number of the last change of the record. Calls name it, so that they affect only the
        /// state that the caller knows.
        pub metadata_generation: u64,
        /// Time of creation in milliseconds since 1970.
        pub created_ms: u64,
        /// Time of the last change in milliseconds since 1970.
        pub updated_ms: u64,
    }
}

wire_struct! {
    /// Lease on a revision, which is neither removed nor moved until the end.
    pub struct WeightLease {
        /// Number of the lease.
        pub id: u64,
        /// Revision of the lease.
        pub revision: WeightId,
        /// Name of the holder.
        pub holder: String,
        /// Time of the end in milliseconds since 1970.
        pub expires_ms: u64,
        /// Number of the last change of the record when the lease was granted.
        pub metadata_generation: u64,
    }
}

wire_struct! {
    /// Record of a revision with its leases.
    pub struct WeightView {
        /// Record of the revision.
        pub revision: WeightRevision,
        /// Number of leases.
        pub leases: u64,
        /// Earliest end of a lease in milliseconds since 1970.
        pub nearest_expiry_ms: Option<u64>,
    }
}

wire_struct! {
    /// Some revisions of one resource.
    pub struct WeightPage {
        /// Revisions in the order of their names and generations.
        pub views: Vec<WeightView>,
        /// Token of the next page; empty if this page is the last one.
        pub next: String,
    }
}

wire_struct! {
    /// State of a move of the objects of a revision.
    pub struct WeightOperation {
        /// Number of the move.
        pub id: u64,
        /// Revision of the objects.
        pub revision: WeightId,
        /// Kind of the move.
        pub kind: WeightMove,
        /// Location that the objects move to.
        pub target: WeightResidency,
        /// Number of the last change of the record when the move began.
        pub metadata_generation: u64,
        /// Time of the start in milliseconds since 1970.
        pub started_ms: u64,
        /// Time of the last progress in milliseconds since 1970.
        pub updated_ms: u64,
        /// Number of objects that have moved, the manifest included.
        pub done: u64,
        /// Number of objects, the manifest included.
        pub total: u64,
        /// Position of the move, always empty.
        pub cursor: String,
        /// Outcome for people; empty while the move is in progress.
        pub message: String,
    }
}

wire_struct! {
    /// Request to begin an import.
    pub struct WeightImport {
        /// Revision to import.
        pub id: WeightId,
        /// Name of the group, or empty: the identity determines it.
        pub group: String,
        /// Number of payloads.
        pub payloads: u64,
        /// Size of all payloads in bytes.
        pub bytes: u64,
    }
}

wire_struct! {
    /// Request to complete an import.
    pub struct WeightCommit {
        /// Imported revision.
        pub id: WeightId,
        /// Number of the last change that the caller knows.
        pub metadata_generation: u64,
        /// Objects that the revision must have.
        pub manifest: WeightManifest,
    }
}

wire_struct! {
    /// Request to change a revision.
    pub struct WeightChange {
        /// Revision to change.
        pub id: WeightId,
        /// Number of the last change that the caller knows.
        pub metadata_generation: u64,
    }
}

wire_struct! {
    /// Request about a revision.
    pub struct WeightQuery {
        /// Requested revision.
        pub id: WeightId,
    }
}

wire_struct! {
    /// Request to list the revisions of one resource.
    pub struct WeightList {
        /// Tenant of the resource.
        pub tenant: String,
        /// Namespace of the resource.
        pub namespace: String,
        /// Name of the resource.
        pub resource: String,
        /// Token of the page, from the page before; empty for the first page.
        pub token: String,
        /// Maximum number of revisions, from 1 to 1000.
        pub limit: u32,
    }
}

wire_struct! {
    /// Request for a lease.
    pub struct WeightLeaseRequest {
        /// Revision of the lease.
        pub id: WeightId,
        /// Number of the last change that the caller knows.
        pub metadata_generation: u64,
        /// Name of the holder. A revision has one lease for each holder.
        pub holder: String,
        /// Duration of the lease in milliseconds.
        pub ttl_ms: u64,
    }
}

wire_struct! {
    /// Request to extend a lease.
    pub struct WeightLeaseRenewal {
        /// Tenant of the revision.
        pub tenant: String,
        /// Number of the lease.
        pub lease: u64,
        /// Duration of the lease from now on, in milliseconds.
        pub ttl_ms: u64,
    }
}

wire_struct! {
    /// Request to end a lease.
    pub struct WeightLeaseRelease {
        /// Tenant of the revision.
        pub tenant: String,
        /// Number of the lease.
        pub lease: u64,
    }
}

wire_struct! {
    /// Request to move the objects of a revision.
    pub struct WeightMoveRequest {
        /// Revision of the objects.
        pub id: WeightId,
        /// Number of the last change that the caller knows.
        pub metadata_generation: u64,
        /// Number of the [`WeightResidency`] to move to. An unknown number is an error of the call,
        /// and not of the message.
        pub target: Byte,
    }
}

wire_struct! {
    /// Request about a move.
    pub struct WeightOperationQuery {
        /// Tenant of the revision.
        pub tenant: String,
        /// Number of the move.
        pub operation: u64,
    }
}

/// Declares an enumeration that is encoded as a byte.
macro_rules! byte_enum {
    (
        $what:literal;
        $(#[$meta:meta])*
        pub enum $name:ident { $($(#[$case_meta:meta])* $case:ident = $number:literal,)* }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum $name { $($(#[$case_meta])* $case = $number,)* }

        impl $name {
            /// Every value, by ascending number.
            pub const ALL: &[Self] = &[$(Self::$case),*];

            /// Returns the value with a number.
            pub fn from_number(number: u8) -> Option<Self> {
                Self::ALL.iter().copied().find(|value| *value as u8 == number)
            }
        }

        written_as! {
            $name as Byte: value => Byte(*value as u8), |byte| known($name::from_number(byte.0), $what, byte.0);
        }
    };
}

byte_enum! {
    "availability of weights";
    /// Availability of the objects of a revision.
    pub enum WeightAvailability {
        /// The import has begun.
        Importing = 0,
        /// Every object can be read.
        Ready = 1,
        /// Objects are lost.
        Degraded = 2,
        /// The objects are being removed.
        Deleting = 3,
        /// The objects are removed. Only the record is left.
        Deleted = 4,
    }
}

byte_enum! {
    "residency of weights";
    /// Location of the objects of a revision.
    pub enum WeightResidency {
        /// Unknown, during an import.
        Unknown = 0,
        /// Every object is in memory.
        Hot = 1,
        /// Every object is on disk only.
        Cold = 2,
        /// Some objects are in memory.
        Mixed = 3,
        /// No object can be read.
        Absent = 4,
    }
}

byte_enum! {
    "move of weights";
    /// Kind of a move of the objects of a revision.
    pub enum WeightMove {
        /// No move.
        None = 0,
        /// From memory to disk.
        Demote = 1,
        /// From disk to memory.
        Promote = 2,
    }
}

byte_enum! {
    "error of weights";
    /// Error of a call about managed weights.
    pub enum WeightError {
        /// An argument is invalid.
        InvalidArgument = 1,
        /// The revision, lease or move is unknown.
        NotFound = 2,
        /// The objects or the state of the revision contradict the request.
        Conflict = 3,
        /// The caller does not know the last change of the record.
        StaleGeneration = 4,
        /// The revision is not in the state for this call.
        NotReady = 5,
        /// A lease or a move is in the way, or a limit is reached.
        Busy = 6,
        /// The lease has expired.
        LeaseExpired = 7,
        /// No further change of the record can be numbered.
        GenerationExhausted = 8,
        /// The change was not stored.
        DurabilityFailed = 9,
        /// The objects cannot be moved there.
        PolicyUnsatisfiable = 10,
    }
}

impl Numbered for WeightError {
    type Number = Self;

    fn to_number(&self) -> Self {
        *self
    }

    fn from_number(number: Self) -> Self {
        number
    }
}

impl fmt::Display for WeightError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InvalidArgument => "an argument is invalid",
            Self::NotFound => "the revision, lease or move is unknown",
            Self::Conflict => "the objects or the state of the revision contradict the request",
            Self::StaleGeneration => "the revision has changed",
            Self::NotReady => "the revision is not ready",
            Self::Busy => "a lease or a move is in the way, or a limit is reached",
            Self::LeaseExpired => "the lease has expired",
            Self::GenerationExhausted => "no further change can be numbered",
            Self::DurabilityFailed => "the change was not stored",
            Self::PolicyUnsatisfiable => "the objects cannot be moved there",
        })
    }
}

impl std::error::Error for WeightError {}
