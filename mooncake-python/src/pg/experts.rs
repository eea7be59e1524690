//! Routes and layouts of expert parallelism. Calls name memory by address; the caller keeps it
//! during the call, and nothing else touches memory that a call writes.

use std::num::NonZero;

use mooncake_core::{Error, Result};
use mooncake_pg::experts::{Layout, Part, Routes, Rows, Sizes, add_up, quantize};
use pyo3::prelude::*;

use super::arguments::Span;
use crate::error::exception;
use crate::interpreter::detached;

/// Element of a tensor: every bit pattern is a value.
trait Element: Copy {}
impl Element for u8 {}
impl Element for i32 {}
impl Element for i64 {}
impl Element for f32 {}

/// Returns the first element and the number of elements.
fn checked<T: Element>(span: Span) -> Result<(*mut T, usize)> {
    let buffer = span.buffer();
    if buffer.len == 0 {
        return Ok((std::ptr::dangling_mut(), 0));
    }
    let is_aligned = buffer.address != 0 && buffer.address.is_multiple_of(align_of::<T>());
    if !is_aligned || !buffer.len.is_multiple_of(size_of::<T>()) || isize::try_from(buffer.len).is_err() {
        let (address, len) = (buffer.address, buffer.len);
        return Err(Error::invalid(format!(
            "cannot use tensor: wrong memory. address={address:#x} bytes={len}"
        )));
    }
    Ok((std::ptr::with_exposed_provenance_mut(buffer.address), buffer.len / size_of::<T>()))
}

fn input<'a, T: Element>(span: Span) -> Result<&'a [T]> {
    let (first, len) = checked::<T>(span)?;
    // SAFETY: the caller keeps the memory during the call, in which nothing writes it.
    #[allow(unsafe_code)]
    Ok(unsafe { std::slice::from_raw_parts(first, len) })
}

fn output<'a, T: Element>(span: Span) -> Result<&'a mut [T]> {
    let (first, len) = checked::<T>(span)?;
    // SAFETY: the caller keeps the memory during the call, in which nothing else touches it.
    #[allow(unsafe_code)]
    Ok(unsafe { std::slice::from_raw_parts_mut(first, len) })
}

/// Makes a call without holding the interpreter.
fn run<R: Send>(py: Python<'_>, work: impl FnOnce() -> Result<R> + Send) -> PyResult<R> {
    detached(py, work).map_err(|error| exception(py, &error))
}

fn threads(number: usize) -> NonZero<usize> {
    NonZero::new(number).unwrap_or(NonZero::<usize>::MIN)
}

/// Sizes on which all ranks agree.
#[pyclass(frozen, module = "mooncake._mooncake", name = "ExpertSizes")]
pub(super) struct ExpertSizes {
    sizes: Sizes,
}

#[pymethods]
impl ExpertSizes {
    #[new]
    fn new(
        py: Python<'_>,
        ranks: usize,
        experts: usize,
        tokens: usize,
        hidden: usize,
        is_fp8: bool,
    ) -> PyResult<Self> {
        let sizes = Sizes::new(ranks, experts, tokens, hidden, is_fp8);
        Ok(Self { sizes: sizes.map_err(|error| exception(py, &error))? })
    }

    /// Returns the bytes of a row.
    fn width(&self) -> usize {
        self.sizes.width()
    }

    /// Writes each token of `bfloat16` as a row of elements and scales, with at most that many
    /// threads.
    fn quantize(&self, py: Python<'_>, tokens: Span, rows: Span, threads: usize) -> PyResult<()> {
        let threads = self::threads(threads);
        run(py, || quantize(&self.sizes, input(tokens)?, output(rows)?, threads))
    }

    /// Returns the largest number of rows of a message whose tokens have `choices` experts each.
    fn space(&self, choices: usize) -> usize {
        self.sizes.space(choices)
    }
}

/// Routes of the tokens of this rank.
#[pyclass(frozen, module = "mooncake._mooncake", name = "ExpertRoutes")]
pub(super) struct ExpertRoutes {
    routes: Routes,
}

#[pymethods]
impl ExpertRoutes {
    #[new]
    fn new(
        py: Python<'_>,
        topk: Span,
        choices: usize,
        ranks: usize,
        experts: usize,
        own: usize,
    ) -> PyResult<Self> {
        Ok(Self { routes: run(py, || Routes::new(input(topk)?, choices, ranks, experts, own))? })
    }

    /// Returns the number of pairs of each rank.
    fn pairs(&self) -> Vec<usize> {
        self.routes.pairs()
    }

    /// Returns the number of rows of each rank's front.
    fn fronts(&self, sizes: &ExpertSizes, is_active: Vec<bool>) -> Vec<usize> {
        self.routes.fronts(&sizes.sizes, &is_active)
    }

    /// Writes the fronts of all ranks, one after the other. Returns for each rank the tokens that
    /// follow, as first tokens and numbers.
    fn write_fronts(
        &self,
        py: Python<'_>,
        sizes: &ExpertSizes,
        is_active: Vec<bool>,
        space: Span,
    ) -> PyResult<Vec<Vec<(usize, usize)>>> {
        let runs = run(py, || self.routes.write_fronts(&sizes.sizes, &is_active, output(space)?))?;
        Ok(runs.into_iter().map(|of_one| of_one.iter().map(|run| (run.first, run.count)).collect()).collect())
    }

    /// Writes for each choice the row of its pair, or -1. The pairs of another rank lie one after
    /// the other from its row in `firsts` on, and those of each own expert from its row in `own`
    /// on.
    fn rows(
        &self,
        py: Python<'_>,
        firsts: Vec<Option<usize>>,
        own: Option<Vec<usize>>,
        rows: Span,
    ) -> PyResult<()> {
        run(py, || self.routes.rows(&firsts, own.as_deref(), output(rows)?))
    }
}

/// Layout of the tokens that this rank has got.
#[pyclass(frozen, module = "mooncake._mooncake", name = "ExpertLayout")]
pub(super) struct ExpertLayout {
    layout: Layout,
}

#[pymethods]
impl ExpertLayout {
    /// Reads the messages of the other ranks: the first row and the length of each, and the largest
    /// number of rows. Takes the own tokens by the routes.
    #[new]
    fn new(
        py: Python<'_>,
        sizes: &ExpertSizes,
        routes: &ExpertRoutes,
        received: Span,
        own: Span,
        parts: Vec<Option<(usize, u64)>>,
        space: Vec<Option<usize>>,
    ) -> PyResult<Self> {
        let parts: Vec<_> =
            parts.into_iter().map(|part| part.map(|(first, len)| Part { first, len })).collect();
        let layout = run(py, || {
            let rows = Rows::new(sizes.sizes.width(), input(received)?, input(own)?)?;
            Layout::read(sizes.sizes, &routes.routes, rows, &parts, &space)
        });
        Ok(Self { layout: layout? })
    }

    /// Returns the ranks whose message is missing.
    fn missing(&self) -> Vec<usize> {
        self.layout.missing().to_vec()
    }

    /// Returns the number of tokens of each local expert.
    fn counts(&self) -> Vec<usize> {
        self.layout.counts()
    }

    /// Returns the row of each token: a received one, or after all of them an own one.
    fn rows(&self) -> Vec<usize> {
        self.layout.rows().collect()
    }

    /// Writes the number of tokens of each local expert, the rows of each rank there, and the index
    /// of each token at its source.
    fn write(&self, py: Python<'_>, count: Span, ranges: Span, sources: Span) -> PyResult<()> {
        run(py, || self.layout.write(output(count)?, output(ranges)?, output(sources)?))
    }

    /// Copies the tokens to the rows of their experts, with at most that many threads.
    fn place(
        &self,
        py: Python<'_>,
        received: Span,
        own: Span,
        elements: Span,
        scales: Span,
        threads: usize,
    ) -> PyResult<()> {
        let threads = self::threads(threads);
        run(py, || {
            let rows = Rows::new(self.layout.width(), input(received)?, input(own)?)?;
            self.layout.place(rows, output(elements)?, output(scales)?, threads)
        })
    }
}

/// Adds up rows of `bfloat16` with `width` bytes for each token, with a row and a weight for each
/// of its choices. A negative row stands for none.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "one call is one sum")]
pub(super) fn add_up_rows(
    py: Python<'_>,
    width: usize,
    received: Span,
    own: Span,
    rows: Span,
    weights: Span,
    out: Span,
    threads: usize,
) -> PyResult<()> {
    let threads = self::threads(threads);
    run(py, || {
        let memory = Rows::new(width, input(received)?, input(own)?)?;
        add_up(memory, input(rows)?, input(weights)?, output(out)?, threads)
    })
}
