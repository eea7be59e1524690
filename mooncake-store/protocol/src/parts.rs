//! Batches in parts. A batch about many items travels as several calls, one after the other, each
//! with a request and a response that fit into one frame.

use std::borrow::Cow;

use mooncake_core::error::{Error, Reason, Result};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::replica::ReplicateConfig;

use crate::wire::ProbePolicy;

/// Maximum number of items of one call.
pub const MAX_ITEMS: usize = 16 << 10;
/// Maximum length of the items of one call in bytes, with the part of the response that is known
/// beforehand. One item may be longer.
pub const MAX_BYTES: usize = 16 << 20;
/// Length in a request of what belongs to one key, without the key, in bytes.
pub const KEY_OVERHEAD: usize = 8;

/// Treatment of a call that fails after earlier calls of the same batch were answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFailure {
    /// The items of earlier calls have their results. The others have the error.
    KeepResults,
    /// The batch fails, as if no response had arrived.
    FailAll,
}

/// Returns the items from the front that one call takes, at least one if there is one. `len` is
/// the length of an item.
pub fn front<I>(items: &[I], most: usize, len: impl Fn(&I) -> usize) -> &[I] {
    let mut bytes = 0_usize;
    let fits = |item: &&I| {
        bytes = bytes.saturating_add(len(item));
        bytes <= MAX_BYTES
    };
    let count = items.iter().take(most).take_while(fits).count();
    &items[..count.max(1).min(items.len())]
}

/// Returns the maximum number of items of the next call after one about `items` items has failed,
/// or `None` if fewer items would fail, too. A call that was made is not repeated with
/// [`OnFailure::FailAll`].
pub fn shorter(items: usize, error: &Error, on_failure: OnFailure) -> Option<usize> {
    let is_too_long = match error.reason() {
        Some(Reason::TooLong) => true,
        Some(Reason::ResponseTooLong) => on_failure == OnFailure::KeepResults,
        _ => false,
    };
    (is_too_long && items > 1).then_some(items / 2)
}

/// Makes calls about all items, each about some of them. `call` takes the index of the first item
/// and the items of one call. A call that is too long is repeated with fewer items.
///
/// # Errors
/// Returns the error of the first call, or of any call with [`OnFailure::FailAll`].
pub async fn call_in_parts<'k, I, T, F>(
    items: &'k [I],
    len: impl Fn(&I) -> usize,
    on_failure: OnFailure,
    call: impl Fn(usize, &'k [I]) -> F,
) -> Result<Vec<Result<T>>>
where
    F: Future<Output = Result<Vec<Result<T>>>>,
{
    let (mut results, mut most) = (Vec::new(), MAX_ITEMS);
    loop {
        let done = results.len();
        let part = front(&items[done..], most, &len);
        match call(done, part).await {
            Ok(answers) if part.len() == items.len() => return Ok(answers),
            Ok(answers) => {
                results.reserve_exact(items.len() - done);
                results.extend(answers);
                if results.len() >= items.len() {
                    return Ok(results);
                }
            }
            Err(error) => match shorter(part.len(), &error, on_failure) {
                Some(fewer) => most = fewer,
                None if done == 0 || on_failure == OnFailure::FailAll => return Err(error),
                None => {
                    results.resize_with(items.len(), || Err(error.clone()));
                    return Ok(results);
                }
            },
        }
    }
}

/// Probes objects. `call` makes one call, and `lease` finds objects and grants leases on them.
///
/// If one call cannot take all keys, the last group that can be read is known only after the last
/// call. It is leased then.
///
/// # Errors
/// Returns the error of the first call. `INVALID_PARAMS` for each key if their number is not a
/// multiple of the group size.
pub async fn probe_in_parts<'k, K, P, L>(
    keys: &'k [K],
    key_len: impl Fn(&K) -> usize,
    policy: ProbePolicy,
    call: impl Fn(&'k [K], ProbePolicy) -> P,
    lease: impl Fn(&'k [K]) -> L,
) -> Result<Vec<Result<bool>>>
where
    P: Future<Output = Result<Vec<Result<bool>>>>,
    L: Future<Output = Result<Vec<Result<bool>>>>,
{
    if policy.mode != ProbePolicy::LAST_HIT_ONLY {
        return call_in_parts(keys, key_len, OnFailure::KeepResults, |_, part| call(part, policy)).await;
    }
    let group = match policy.group_of(keys.len()) {
        Ok(group) => group,
        Err(error) => return Ok(keys.iter().map(|_| Err(error.clone())).collect()),
    };
    if front(keys, MAX_ITEMS, &key_len).len() == keys.len() {
        match call(keys, policy).await {
            Err(error) if shorter(keys.len(), &error, OnFailure::KeepResults).is_some() => {}
            found => return found,
        }
    }
    let probe = |_, part| call(part, ProbePolicy::NONE);
    let mut found = call_in_parts(keys, key_len, OnFailure::KeepResults, probe).await?;
    let can_read = |found: &[Result<bool>]| found.iter().all(|found| matches!(found, Ok(true)));
    for (keys, found) in keys.chunks(group).zip(found.chunks_mut(group)).rev() {
        if can_read(found) {
            // An object that was removed since then is not readable, and its group is not the last.
            let leased = lease(keys).await?;
            found.clone_from_slice(&leased[..found.len().min(leased.len())]);
            if can_read(found) {
                break;
            }
        }
    }
    Ok(found)
}

/// Returns the options of `count` of `all` items from index `at` on: their items of lists, and the
/// hints of a chain that begins before them. `key` returns the key of an item.
pub fn part_of<'c, 'k>(
    config: &'c ReplicateConfig,
    at: usize,
    count: usize,
    all: usize,
    key: impl Fn(usize) -> &'k [u8],
) -> Cow<'c, ReplicateConfig> {
    if count == all || is_planted("parts-forget-groups") {
        return Cow::Borrowed(config);
    }
    let mut part = Cow::Borrowed(config);
    if config.has_lists() {
        part = Cow::Owned(config.of_keys(at..at + count, all));
    }
    if at > 0
        && let Some(hints) = &config.hints
    {
        part.to_mut().hints = Some(Box::new(hints.after_keys(at, key(at - 1))));
    }
    part
}

#[cfg(test)]
mod tests {
    use mooncake_core::ErrorCode;
    use parking_lot::Mutex;

    use super::*;

    fn too_long() -> Error {
        Error::invalid("too long").with_reason(Reason::TooLong)
    }

    /// Makes calls that accept `most` items each, and fail from item `failing` on. Returns the
    /// results and the numbers of items in the calls.
    async fn calls(
        count: usize,
        most: usize,
        failing: usize,
        on_failure: OnFailure,
    ) -> (Result<Vec<Result<usize>>>, Vec<usize>) {
        let items: Vec<usize> = (0..count).collect();
        let made = Mutex::new(Vec::new());
        let call = |at: usize, part: &[usize]| {
            made.lock().push(part.len());
            assert_eq!(part.first().copied().unwrap_or(at), at);
            let answer = if part.len() > most {
                Err(too_long())
            } else if at + part.len() > failing {
                Err(Error::new(ErrorCode::RpcTimeout, "late"))
            } else {
                Ok(part.iter().map(|item| Ok(*item)).collect())
            };
            std::future::ready(answer)
        };
        let results = call_in_parts(&items, |_| 8, on_failure, call).await;
        (results, made.into_inner())
    }

    #[tokio::test]
    async fn items_are_requested_once_in_order() {
        for (count, most) in [(0, 1), (1, 1), (7, 7), (7, 3), (MAX_ITEMS * 2 + 5, MAX_ITEMS), (100, 1)] {
            let (results, _) = calls(count, most, usize::MAX, OnFailure::FailAll).await;
            let results: Vec<usize> = results.unwrap().into_iter().map(Result::unwrap).collect();
            assert!(results.into_iter().eq(0..count), "{count} items, {most} at a time");
        }
        let (results, made) = calls(10, 0, usize::MAX, OnFailure::KeepResults).await;
        assert_eq!(results.unwrap_err().reason(), Some(Reason::TooLong));
        assert_eq!(made, [10, 5, 2, 1], "one item that is too long is refused");
    }

    #[tokio::test]
    async fn a_failure_leaves_earlier_results() {
        let count = MAX_ITEMS * 3;
        let (results, made) = calls(count, MAX_ITEMS, MAX_ITEMS, OnFailure::KeepResults).await;
        let results = results.unwrap();
        assert_eq!((results.len(), made.len()), (count, 2), "no further call is made");
        assert!(results[..MAX_ITEMS].iter().all(Result::is_ok));
        let code = |result: &Result<usize>| result.as_ref().is_err_and(|e| e.code() == ErrorCode::RpcTimeout);
        assert!(results[MAX_ITEMS..].iter().all(code));
        for (failing, on_failure) in [(MAX_ITEMS, OnFailure::FailAll), (0, OnFailure::KeepResults)] {
            let (results, _) = calls(count, MAX_ITEMS, failing, on_failure).await;
            assert_eq!(results.unwrap_err().code(), ErrorCode::RpcTimeout);
        }
    }

    #[test]
    fn parts_are_bounded_in_items_and_bytes() {
        let items = vec![MAX_BYTES / 4; 100];
        assert_eq!(front(&items, MAX_ITEMS, |len| *len).len(), 4);
        assert_eq!(front(&items, 3, |len| *len).len(), 3);
        assert_eq!(front(&items, MAX_ITEMS, |_| usize::MAX).len(), 1);
        assert!(front(&items[..0], MAX_ITEMS, |_| 1).is_empty());
    }
}
