//! Opened segments of an engine.

use std::collections::HashMap;

use super::target::Target;
use crate::transport::Transport;

/// Opened segments by name.
#[derive(Debug)]
pub(super) struct Targets<T: Transport>(HashMap<String, OpenedTarget<T>>);

#[derive(Debug)]
struct OpenedTarget<T: Transport> {
    target: Target<T>,
    /// True if the segment was opened since the last look at unused ones.
    is_used: bool,
}

impl<T: Transport> Default for Targets<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T: Transport> Targets<T> {
    /// Returns an opened segment, which counts as a use.
    pub(super) fn use_target(&mut self, name: &str) -> Option<Target<T>> {
        let opened = self.0.get_mut(name)?;
        opened.is_used = true;
        Some(opened.target.clone())
    }

    /// Returns the segment of that name, or the one that `create` returns.
    pub(super) fn use_or_insert(&mut self, name: &str, create: impl FnOnce() -> Target<T>) -> Target<T> {
        let create = || OpenedTarget { target: create(), is_used: true };
        let opened = self.0.entry(name.to_owned()).or_insert_with(create);
        opened.is_used = true;
        opened.target.clone()
    }

    pub(super) fn remove(&mut self, name: &str) -> Option<Target<T>> {
        self.0.remove(name).map(|opened| opened.target)
    }

    pub(super) fn all(&self) -> Vec<Target<T>> {
        self.0.values().map(|opened| opened.target.clone()).collect()
    }

    /// Removes the segments that no caller has used since the last call, and that `is_needed`
    /// rejects.
    pub(super) fn take_unused(&mut self, is_needed: impl Fn(&Target<T>) -> bool) -> Vec<Target<T>> {
        let unused = |_: &String, opened: &mut OpenedTarget<T>| {
            !std::mem::take(&mut opened.is_used) && !opened.target.is_shared() && !is_needed(&opened.target)
        };
        self.0.extract_if(unused).map(|(_, opened)| opened.target).collect()
    }
}
