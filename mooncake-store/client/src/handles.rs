//! Handles for groups of operations. A handle borrows a client and costs nothing.

use mooncake_transport::Transport;

use crate::state::Client;

/// Defines handles and the methods of [`Client`] that return them.
macro_rules! handles {
    ($($(#[$of:meta])* $method:ident => $(#[$about:meta])* $handle:ident;)*) => {
        $(
            $(#[$about])*
            #[derive(Debug)]
            pub struct $handle<'c, T: Transport> {
                pub(crate) client: &'c Client<T>,
            }

            impl<T: Transport> Clone for $handle<'_, T> {
                fn clone(&self) -> Self {
                    *self
                }
            }

            impl<T: Transport> Copy for $handle<'_, T> {}
        )*

        /// Handles for groups of operations.
        impl<T: Transport> Client<T> {
            $(
                $(#[$of])*
                pub fn $method(&self) -> $handle<'_, T> {
                    $handle { client: self }
                }
            )*
        }
    };
}

handles! {
    /// Returns the operations on parts of objects.
    ranges =>
    /// Reads and writes of parts of objects.
    ///
    /// A read begins with [`locate`](Self::locate). A write consists of [`reserve`](Self::reserve),
    /// any number of calls of [`write`](Self::write), and [`commit`](Self::commit).
    ClientRanges;

    /// Returns the operations on the replicas of objects.
    replicas =>
    /// Locations of objects, and requests to copy, move and remove replicas.
    ClientReplicas;

    /// Returns the operations on the storage that this client offers.
    segments =>
    /// Memory and disk space that a client offers to the cluster.
    ClientSegments;

    /// Returns the operations on registered memory.
    memory =>
    /// Registered memory for operations without a copy.
    ClientMemory;

    /// Returns the health and the statistics of this client.
    status =>
    /// Health and statistics of a client.
    ClientStatus;
}
