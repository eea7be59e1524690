//! Parts of large batches. The objects of a batch are read or stored in consecutive parts. Each
//! part has its own requests to the master, its own leases, and the time of one operation.

use mooncake_core::Result;
use mooncake_protocol::parts::MAX_ITEMS;

/// Maximum number of objects of a part, which one call of the master locates or grants space for.
pub(crate) const PART_OBJECTS: usize = MAX_ITEMS;
/// Maximum number of bytes of a part. One object may be longer.
pub(crate) const PART_BYTES: u64 = 4 << 30;

/// Returns the number of objects from the front that one part takes, at least one if there is one.
/// `lens` has the length of each object.
pub(crate) fn part_len(lens: impl Iterator<Item = u64>) -> usize {
    let mut bytes = 0_u64;
    let fits = |(at, len): &(usize, u64)| {
        bytes = bytes.saturating_add(*len);
        *at == 0 || bytes <= PART_BYTES
    };
    lens.take(PART_OBJECTS).enumerate().take_while(fits).count()
}

/// Makes calls about consecutive parts of `keys`, of at most [`PART_OBJECTS`] keys each. After a
/// call that fails, no other call is made, and the other keys have its error.
///
/// # Errors
/// Returns the error of the first call.
pub(crate) async fn call_by_parts<'k, K, R, F>(
    keys: &'k [K],
    call: impl Fn(&'k [K]) -> F,
) -> Result<Vec<Result<R>>>
where
    F: Future<Output = Result<Vec<Result<R>>>>,
{
    let mut results = Vec::new();
    loop {
        let rest = &keys[results.len()..];
        let part = &rest[..rest.len().min(PART_OBJECTS)];
        match call(part).await {
            Ok(more) if part.len() == keys.len() => return Ok(more),
            Ok(more) => results.extend(more),
            Err(error) if results.is_empty() => return Err(error),
            Err(error) => results.resize_with(keys.len(), || Err(error.clone())),
        }
        if results.len() >= keys.len() {
            return Ok(results);
        }
    }
}

#[cfg(test)]
mod tests {
    use mooncake_core::{Error, ErrorCode};
    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn parts_are_bounded_in_objects_and_bytes() {
        assert_eq!(part_len([0; 0].into_iter()), 0);
        assert_eq!(part_len(std::iter::repeat_n(1, PART_OBJECTS * 2)), PART_OBJECTS);
        assert_eq!(part_len([PART_BYTES / 4; 9].into_iter()), 4);
        assert_eq!(part_len([u64::MAX, 1].into_iter()), 1, "an object may be longer than a part");
        assert_eq!(part_len([1, u64::MAX, 1].into_iter()), 1);
    }

    #[tokio::test]
    async fn a_part_that_fails_leaves_earlier_results() {
        let keys: Vec<usize> = (0..PART_OBJECTS * 3).collect();
        for failing in 0..4 {
            let part_lens = Mutex::new(Vec::new());
            let call = |part: &[usize]| {
                part_lens.lock().push(part.len());
                let fails = part_lens.lock().len() > failing;
                let response = part.iter().map(|key| Ok(*key)).collect();
                std::future::ready(if fails { Err(Error::from(ErrorCode::RpcTimeout)) } else { Ok(response) })
            };
            let results = call_by_parts(&keys, call).await;
            assert_eq!(part_lens.into_inner(), vec![PART_OBJECTS; (failing + 1).min(3)]);
            let Ok(results) = results else {
                assert_eq!(failing, 0);
                continue;
            };
            let completed = (failing * PART_OBJECTS).min(keys.len());
            assert!(
                results[..completed]
                    .iter()
                    .zip(&keys)
                    .all(|(result, key)| matches!(result, Ok(value) if value == key))
            );
            assert!(results[completed..].iter().all(Result::is_err));
            assert_eq!(results.len(), keys.len());
        }
        let none = call_by_parts(&keys[..0], |part| std::future::ready(Ok(vec![Ok(()); part.len()]))).await;
        assert!(none.unwrap().is_empty());
    }
}
