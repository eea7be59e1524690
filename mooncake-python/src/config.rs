//! `ReplicateConfig` as Python has it.

use mooncake_core::hints::{KeepPart, PutHints};
use mooncake_core::replica::{self, DataType, MAX_SESSION_ID, SoftPin};
use mooncake_core::{Error, Result};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple, PyType};

use crate::args::{Uint, text, texts, texts_of_each, truth};

/// Settings for storing an object: replicas, pins, placement and groups.
#[pyclass(subclass, weakref, module = "mooncake.store", name = "ReplicateConfig")]
#[derive(Clone, Debug, Default)]
pub(crate) struct ReplicateConfig {
    inner: replica::ReplicateConfig,
}

fn enumeration<'py>(py: Python<'py>, name: &str, number: u8) -> PyResult<Bound<'py, PyAny>> {
    py.import("mooncake._types")?.getattr(name)?.call1((number,))
}

fn number_of(value: &Bound<'_, PyAny>, name: &str) -> PyResult<u8> {
    let class = value.py().import("mooncake._types")?.getattr(name)?;
    if !value.is_instance(&class)? {
        return Err(PyTypeError::new_err(format!("incompatible value {value}: a {name} is needed")));
    }
    value.getattr("value")?.extract()
}

#[pymethods]
impl ReplicateConfig {
    /// Accepts no arguments. A subclass may have its own.
    #[new]
    #[classmethod]
    #[pyo3(signature = (*args, **kwargs))]
    fn new(
        class: &Bound<'_, PyType>,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let given = args.len() + kwargs.map_or(0, |kwargs| kwargs.len());
        if given > 0 && class.is(class.py().get_type::<Self>()) {
            return Err(PyTypeError::new_err(
                "incompatible constructor arguments: ReplicateConfig takes no arguments",
            ));
        }
        Ok(Self::default())
    }

    #[getter]
    fn replica_num(&self) -> u64 {
        self.inner.replicas
    }

    #[setter]
    fn set_replica_num(&mut self, value: Uint) {
        self.inner.replicas = value.0;
    }

    #[getter]
    fn nof_replica_num(&self) -> u64 {
        self.inner.nof_replicas
    }

    #[setter]
    fn set_nof_replica_num(&mut self, value: Uint) {
        self.inner.nof_replicas = value.0;
    }

    #[getter]
    fn dfs_replica_num(&self) -> u64 {
        self.inner.dfs_replicas
    }

    #[setter]
    fn set_dfs_replica_num(&mut self, value: Uint) {
        self.inner.dfs_replicas = value.0;
    }

    #[getter]
    fn with_soft_pin(&self) -> bool {
        self.inner.soft_pin == SoftPin::Enable
    }

    #[setter]
    fn set_with_soft_pin(&mut self, #[pyo3(from_py_with = truth)] value: bool) {
        self.inner.soft_pin = if value { SoftPin::Enable } else { SoftPin::Preserve };
    }

    #[getter]
    fn soft_pin_action<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        enumeration(py, "SoftPinAction", self.inner.soft_pin as u8)
    }

    #[setter]
    fn set_soft_pin_action(&mut self, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let number = number_of(value, "SoftPinAction")?;
        let unknown = || PyValueError::new_err(format!("invalid SoftPinAction: {number}"));
        self.inner.soft_pin = SoftPin::from_number(number).ok_or_else(unknown)?;
        Ok(())
    }

    #[getter]
    fn soft_pin_ttl_ms(&self) -> Option<u64> {
        self.inner.soft_pin_ttl_ms
    }

    #[setter]
    fn set_soft_pin_ttl_ms(&mut self, value: Option<Uint>) {
        self.inner.soft_pin_ttl_ms = value.map(|ms| ms.0);
    }

    #[getter]
    fn with_hard_pin(&self) -> bool {
        self.inner.hard_pin
    }

    #[setter]
    fn set_with_hard_pin(&mut self, #[pyo3(from_py_with = truth)] value: bool) {
        self.inner.hard_pin = value;
    }

    #[getter]
    fn preferred_segment(&self) -> &str {
        &self.inner.preferred_segment
    }

    #[setter]
    fn set_preferred_segment(&mut self, #[pyo3(from_py_with = text)] value: String) {
        self.inner.preferred_segment = value;
    }

    #[getter]
    fn preferred_segments(&self) -> Vec<String> {
        self.inner.preferred_segments.clone()
    }

    #[setter]
    fn set_preferred_segments(&mut self, #[pyo3(from_py_with = texts)] value: Vec<String>) {
        self.inner.preferred_segments = value;
    }

    #[getter]
    fn preferred_nof_segments(&self) -> Vec<String> {
        self.inner.preferred_nof_segments.clone()
    }

    #[setter]
    fn set_preferred_nof_segments(&mut self, #[pyo3(from_py_with = texts)] value: Vec<String>) {
        self.inner.preferred_nof_segments = value;
    }

    #[getter]
    fn prefer_alloc_in_same_node(&self) -> bool {
        self.inner.same_node
    }

    /// A bool, a number, or the text of one (`"True"`, `""`).
    #[setter]
    fn set_prefer_alloc_in_same_node(&mut self, value: &Bound<'_, PyAny>) -> PyResult<()> {
        self.inner.same_node = match value.cast::<PyString>() {
            Ok(text) => match text.to_str()?.to_ascii_lowercase().as_str() {
                "true" | "1" | "yes" | "on" => true,
                "false" | "0" | "no" | "off" | "" => false,
                other => return Err(PyValueError::new_err(format!("invalid truth value: {other:?}"))),
            },
            Err(_) => truth(value)?,
        };
        Ok(())
    }

    #[getter]
    fn data_type<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        enumeration(py, "ObjectDataType", self.inner.data_type.0)
    }

    #[setter]
    fn set_data_type(&mut self, value: &Bound<'_, PyAny>) -> PyResult<()> {
        self.inner.data_type = DataType(number_of(value, "ObjectDataType")?);
        Ok(())
    }

    #[getter]
    fn group_ids(&self) -> Option<Vec<String>> {
        self.inner.group_ids.clone()
    }

    #[setter]
    fn set_group_ids(&mut self, value: Option<Bound<'_, PyAny>>) -> PyResult<()> {
        self.inner.group_ids = value.as_ref().map(texts).transpose()?;
        Ok(())
    }

    /// Session of each key, for events. `None` for no sessions.
    #[getter]
    fn session_ids(&self) -> Option<Vec<String>> {
        self.inner.session_ids.as_deref().map(texts_of)
    }

    #[setter]
    fn set_session_ids(&mut self, value: Option<Bound<'_, PyAny>>) -> PyResult<()> {
        self.inner.session_ids = value.as_ref().map(names_of).transpose()?;
        Ok(())
    }

    /// Names of preferred RDMA devices.
    #[getter]
    fn preferred_hca_names(&self) -> Option<Vec<String>> {
        self.inner.preferred_hca_names.clone()
    }

    #[setter]
    fn set_preferred_hca_names(&mut self, value: Option<Bound<'_, PyAny>>) -> PyResult<()> {
        self.inner.preferred_hca_names = value.as_ref().map(texts).transpose()?;
        Ok(())
    }

    /// Names of preferred RDMA devices for each key.
    #[getter]
    fn per_key_preferred_hca_names(&self) -> Option<Vec<Vec<String>>> {
        self.inner.per_key_preferred_hca_names.clone()
    }

    #[setter]
    fn set_per_key_preferred_hca_names(&mut self, value: Option<Bound<'_, PyAny>>) -> PyResult<()> {
        self.inner.per_key_preferred_hca_names = value.as_ref().map(texts_of_each).transpose()?;
        Ok(())
    }

    /// Name of the set of weights that each key belongs to, in Mooncake C++.
    #[getter]
    fn residency_affinity_ids(&self) -> Option<Vec<String>> {
        self.inner.residency_affinity_ids.as_deref().map(texts_of)
    }

    #[setter]
    fn set_residency_affinity_ids(&mut self, value: Option<Bound<'_, PyAny>>) -> PyResult<()> {
        self.inner.residency_affinity_ids = value.as_ref().map(names_of).transpose()?;
        Ok(())
    }

    /// Key of the block before the first key of a put. `None` for no hint.
    #[getter]
    fn parent_key(&self) -> Option<String> {
        let parent = self.hints()?.parent.as_deref()?;
        Some(String::from_utf8_lossy(parent).into_owned())
    }

    #[setter]
    fn set_parent_key(&mut self, value: Option<Bound<'_, PyAny>>) -> PyResult<()> {
        let parent = value.as_ref().map(text).transpose()?.map(String::into_bytes);
        self.change_hints(|hints| hints.parent = parent);
        Ok(())
    }

    /// Number of blocks of the chain before the first key of a put. `None` for no hint.
    #[getter]
    fn position(&self) -> Option<u64> {
        self.hints()?.position
    }

    #[setter]
    fn set_position(&mut self, value: Option<Uint>) {
        self.change_hints(|hints| hints.position = value.map(|position| position.0));
    }

    /// Part of the chain that is of use: `"front"` or `"whole"`. `None` for no hint.
    #[getter]
    fn keep(&self) -> Option<&'static str> {
        name_of(self.hints()?.keep)
    }

    #[setter]
    fn set_keep(&mut self, value: Option<Bound<'_, PyAny>>) -> PyResult<()> {
        let name = value.as_ref().map(text).transpose()?;
        let part = match name.as_deref() {
            None => KeepPart::Any,
            Some("front") => KeepPart::Front,
            Some("whole") => KeepPart::Whole,
            Some(other) => {
                let text = format!("cannot set keep: {other:?} is not 'front', 'whole' or None");
                return Err(PyValueError::new_err(text));
            }
        };
        self.change_hints(|hints| hints.keep = part);
        Ok(())
    }

    /// Time in milliseconds after which reads of the objects miss. `None` for no limit.
    #[getter]
    fn ttl_ms(&self) -> Option<u64> {
        self.hints()?.ttl_ms
    }

    #[setter]
    fn set_ttl_ms(&mut self, value: Option<Uint>) {
        self.change_hints(|hints| hints.ttl_ms = value.map(|ms| ms.0));
    }

    /// True if the first read of each object is the last one.
    #[getter]
    fn delete_after_read(&self) -> bool {
        self.hints().is_some_and(|hints| hints.delete_after_read)
    }

    #[setter]
    fn set_delete_after_read(&mut self, #[pyo3(from_py_with = truth)] value: bool) {
        self.change_hints(|hints| hints.delete_after_read = value);
    }

    fn __copy__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        copy_of(slf, |attributes| attributes.call_method0("copy"))
    }

    fn __deepcopy__<'py>(slf: &Bound<'py, Self>, memo: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        copy_of(slf, |attributes| {
            attributes.py().import("copy")?.call_method1("deepcopy", (attributes, memo))
        })
    }

    fn __str__(&self, py: Python<'_>) -> PyResult<String> {
        let c = &self.inner;
        let names = |names: &[String]| format!("[{}]", names.join(", "));
        let data_type: String = self.data_type(py)?.getattr("name")?.extract()?;
        Ok(format!(
            "ReplicateConfig: {{ replica_num: {}, nof_replica_num: {}, dfs_replica_num: {}, \
             soft_pin_action: {}, soft_pin_ttl_ms: {}, with_hard_pin: {}, preferred_segments: {}, \
             preferred_nof_segments: {}, preferred_segment: {}, prefer_alloc_in_same_node: {}, \
             group_ids: {}, data_type: {data_type}{}{} }}",
            c.replicas,
            c.nof_replicas,
            c.dfs_replicas,
            c.soft_pin as u8,
            c.soft_pin_ttl_ms.map_or("unset".to_owned(), |ms| ms.to_string()),
            c.hard_pin,
            names(&c.preferred_segments),
            names(&c.preferred_nof_segments),
            c.preferred_segment,
            c.same_node,
            c.group_ids.as_deref().map_or("unset".to_owned(), names),
            c.residency_affinity_ids.as_deref().map_or_else(String::new, |ids| {
                format!(", residency_affinity_ids: {}", names(&texts_of(ids)))
            }),
            self.hints().map_or_else(String::new, shown),
        ))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        self.__str__(py)
    }
}

impl ReplicateConfig {
    fn hints(&self) -> Option<&PutHints> {
        self.inner.hints.as_deref()
    }

    fn change_hints(&mut self, change: impl FnOnce(&mut PutHints)) {
        let mut hints = self.inner.hints.take().unwrap_or_default();
        change(&mut hints);
        self.inner.hints = Some(hints).filter(|hints| !hints.is_empty());
    }
}

/// Returns names, which Python writes as texts.
fn texts_of(names: &[Vec<u8>]) -> Vec<String> {
    names.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect()
}

/// Converts an argument that is a list of names.
fn names_of(value: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<u8>>> {
    Ok(texts(value)?.into_iter().map(String::into_bytes).collect())
}

fn name_of(part: KeepPart) -> Option<&'static str> {
    match part {
        KeepPart::Any => None,
        KeepPart::Front => Some("front"),
        KeepPart::Whole => Some("whole"),
    }
}

/// Formats the hints that are set, as further fields of a configuration.
fn shown(hints: &PutHints) -> String {
    let fields = [
        hints.parent.as_ref().map(|key| format!(", parent_key: {}", String::from_utf8_lossy(key))),
        hints.position.map(|position| format!(", position: {position}")),
        name_of(hints.keep).map(|part| format!(", keep: {part}")),
        hints.ttl_ms.map(|ms| format!(", ttl_ms: {ms}")),
        hints.delete_after_read.then(|| ", delete_after_read: true".to_owned()),
    ];
    fields.into_iter().flatten().collect()
}

/// Returns a copy of the same class, which may be a subclass, with a copy of the attributes that
/// were added to it.
fn copy_of<'py>(
    config: &Bound<'py, ReplicateConfig>,
    attributes: impl FnOnce(Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    // The constructor of a subclass may require arguments, so it is not called.
    let made = config.py().get_type::<ReplicateConfig>().call_method1("__new__", (config.get_type(),))?;
    made.cast::<ReplicateConfig>()?.borrow_mut().inner = config.borrow().inner.clone();
    if let Some(own) = config.getattr_opt("__dict__")? {
        made.getattr("__dict__")?.call_method1("update", (attributes(own)?,))?;
    }
    Ok(made)
}

/// Optional configuration of a call. `None` means the default.
pub(crate) type Config<'py> = Option<PyRef<'py, ReplicateConfig>>;

/// Checks the configuration for a call with that many keys. Only some calls support placement on
/// the writer's own host.
pub(crate) fn for_call(
    config: &Config<'_>,
    keys: usize,
    same_node: bool,
) -> Result<replica::ReplicateConfig> {
    let Some(config) = config else { return Ok(replica::ReplicateConfig::default()) };
    let config = &config.inner;
    if config.same_node && !same_node {
        return Err(Error::invalid(
            "prefer_alloc_in_same_node is supported by the multi-buffer and session puts only",
        ));
    }
    if config.same_node && config.replicas != 1 {
        return Err(Error::invalid("prefer_alloc_in_same_node requires exactly one replica"));
    }
    let devices = config.per_key_preferred_hca_names.as_ref().map(Vec::len);
    for (name, len) in [
        ("group_ids", config.group_ids.as_ref().map(Vec::len)),
        ("session_ids", config.session_ids.as_ref().map(Vec::len)),
        ("residency_affinity_ids", config.residency_affinity_ids.as_ref().map(Vec::len)),
        ("per_key_preferred_hca_names", devices.filter(|len| *len > 0)),
    ] {
        if let Some(len) = len.filter(|len| *len != keys) {
            return Err(Error::invalid(format!(
                "{name} and keys differ in number. {name}={len} keys={keys}"
            )));
        }
    }
    if let Some(longest) = config.session_ids.iter().flatten().map(Vec::len).max()
        && longest > MAX_SESSION_ID
    {
        return Err(Error::invalid(format!(
            "a name in session_ids is too long. len={longest} maximum={MAX_SESSION_ID}"
        )));
    }
    if config.soft_pin_ttl_ms.is_some() && config.soft_pin != SoftPin::Enable {
        return Err(Error::invalid("soft_pin_ttl_ms requires soft_pin_action ENABLE"));
    }
    if let Some(hints) = &config.hints {
        hints.check()?;
    }
    Ok(config.clone())
}
