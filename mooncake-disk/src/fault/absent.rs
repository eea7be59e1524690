//! Disk without injected faults, for a build without feature `testkit`.

/// Faults of the requests to a disk. The default has none. Only a build with feature `testkit`
/// creates others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults(());

impl Faults {
    pub(crate) fn apply(
        &self,
        _: bool,
        _: u64,
        _: &mut usize,
        _: usize,
    ) -> Result<(), Option<std::io::Error>> {
        Ok(())
    }
}
