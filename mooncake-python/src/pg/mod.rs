//! Process groups under `mooncake.pg`, whose calls name memory by address. The Python half knows
//! torch.

mod arguments;
mod collectives;
mod communicator;
mod context;
mod experts;
mod local;
mod mirror;
mod operation;

use pyo3::prelude::*;

/// Adds the classes and functions to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<context::GroupContext>()?;
    module.add_class::<communicator::GroupCommunicator>()?;
    module.add_class::<operation::GroupOperation>()?;
    module.add_class::<experts::ExpertSizes>()?;
    module.add_class::<experts::ExpertRoutes>()?;
    module.add_class::<experts::ExpertLayout>()?;
    module.add_function(wrap_pyfunction!(experts::add_up_rows, module)?)?;
    module.add_function(wrap_pyfunction!(context::set_fault_reconciliation_window, module)?)?;
    Ok(())
}
