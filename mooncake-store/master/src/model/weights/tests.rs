use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_protocol::wire::{WeightResidency::*, *};

use super::checks::{
    check_commit, check_id, check_import, check_lease, group_of, keys_digest, manifest_key_of, parse_token,
    token_of,
};
use super::table::{MAX_REVISIONS, Weights};
use super::values::{Instants, Progress, Result};

const NOW: Instants = Instants { now: Moment(1_000_000_000), wall_ms: 5_000 };

fn id(resource: &str, revision: &str, generation: u64) -> WeightId {
    let [tenant, namespace, resource, revision] = ["default", "ns", resource, revision].map(str::to_owned);
    WeightId { tenant, namespace, resource, revision, generation }
}

fn begin(table: &mut Weights, id: &WeightId) -> Result<WeightRevision> {
    let group = group_of(id);
    table.begin(id.clone(), group.clone(), &group, (1, 1), NOW)
}

/// Brings a revision to the end of its life.
fn remove(table: &mut Weights, id: &WeightId) {
    table.abort(id, 1, NOW).unwrap();
    table.end_removal(id, NOW).unwrap();
}

/// The names are those of Mooncake C++ 0.3.14.
#[test]
fn names_follow_from_the_identity() {
    let expected = "weight:35f1c7c59c1781c80166ca68697cc8882065a95439cf7d33737d493973d9c0b5";
    assert_eq!(group_of(&id("res", "rev", 1)), expected);
    let keys = [&b"w0"[..], b"w1"];
    let expected = "0ee27b19a7145685758b4284ccef4f2040d22fca6d7056b00385605866a5a001";
    assert_eq!(keys_digest(keys.into_iter()), expected);
    let of = WeightId { namespace: "n s".into(), ..id("r/\u{e9}", "re%v~-._", 12) };
    assert_eq!(manifest_key_of(&of), "weights/n%20s/r%2F%C3%A9/re%25v~-._/12/manifest");
}

#[test]
fn arguments_are_checked() {
    let good = id("res", "rev", 1);
    assert_eq!(check_import(&good, "", 1, 1), Ok(group_of(&good)));
    assert_eq!(check_import(&good, &group_of(&good), 65_535, u64::MAX), Ok(group_of(&good)));
    let long = "q".repeat(1024);
    assert!(check_id(&WeightId { resource: long.clone(), ..good.clone() }).is_ok());
    let names = ["", "a\nb", "a\x7f", "\0", &(long + "q")];
    for name in names.map(str::to_owned) {
        let (resource, namespace, revision) = (name.clone(), name.clone(), name.clone());
        for bad in [
            WeightId { resource, ..good.clone() },
            WeightId { namespace, ..good.clone() },
            WeightId { revision, ..good.clone() },
            WeightId { tenant: name.clone(), ..good.clone() },
        ] {
            assert_eq!(check_id(&bad), Err(WeightError::InvalidArgument), "{bad:?}");
        }
        assert_eq!(check_lease(&name, 1), Err(WeightError::InvalidArgument));
    }
    for (group, payloads, bytes) in [("g", 1, 1), ("", 0, 1), ("", 1, 0), ("", 65_536, 1)] {
        assert_eq!(check_import(&good, group, payloads, bytes), Err(WeightError::InvalidArgument));
    }
    assert_eq!(check_id(&id("res", "rev", 0)), Err(WeightError::InvalidArgument));
    assert_eq!(check_lease("h", 86_400_000), Ok(Duration::from_secs(86_400)));
    for ttl in [0, 86_400_001, u64::MAX] {
        assert_eq!(check_lease("h", ttl), Err(WeightError::InvalidArgument));
    }
}

#[test]
fn a_manifest_names_the_revision() {
    let of = id("res", "rev", 1);
    let good = WeightManifest {
        manifest_key: manifest_key_of(&of),
        sha256: "0".repeat(64),
        group: group_of(&of),
        keys_sha256: "f".repeat(64),
        payloads: 1,
        bytes: 1,
    };
    check_commit(&of, 1, &good).unwrap();
    let bad = [
        WeightManifest { manifest_key: manifest_key_of(&id("res", "rev", 2)), ..good.clone() },
        WeightManifest { sha256: "F".repeat(64), ..good.clone() },
        WeightManifest { sha256: "0".repeat(63), ..good.clone() },
        WeightManifest { keys_sha256: String::new(), ..good.clone() },
        WeightManifest { group: String::new(), ..good.clone() },
        WeightManifest { payloads: 0, ..good.clone() },
        WeightManifest { bytes: 0, ..good.clone() },
    ];
    for bad in bad {
        assert_eq!(check_commit(&of, 1, &bad), Err(WeightError::InvalidArgument), "{bad:?}");
    }
    assert_eq!(check_commit(&of, 0, &good), Err(WeightError::InvalidArgument));
}

#[test]
fn tokens_are_those_of_listed_revisions() {
    assert_eq!(parse_token(&token_of(&id("res", "r\u{e9}", 7))), Some(("r\u{e9}".into(), 7)));
    for bad in ["r", "r\u{1f}", "r\u{1f}x", "\u{1f}1", "r\u{1f}0", "r\u{1f}-1"] {
        assert_eq!(parse_token(bad), None, "{bad:?}");
    }
}

#[test]
fn pages_have_every_revision_once() {
    let mut table = Weights::new(0);
    let all: Vec<_> = (2..6).map(|generation| id("l", &format!("r{}", generation % 2), generation)).collect();
    all.iter().for_each(|id| drop(begin(&mut table, id).unwrap()));
    begin(&mut table, &id("other", "r", 1)).unwrap();
    for limit in 1..6 {
        let (mut listed, mut token) = (Vec::new(), String::new());
        let of = WeightId { revision: String::new(), generation: 0, ..id("l", "", 0) };
        loop {
            let page = table.page(&of, &token, limit, NOW.now).unwrap();
            assert!(page.views.len() <= limit as usize);
            listed.extend(page.views.into_iter().map(|view| view.revision.id));
            if page.next.is_empty() {
                break;
            }
            token = page.next;
        }
        let mut expected = all.clone();
        expected.sort();
        assert_eq!(listed, expected);
    }
    let of = id("l", "", 0);
    for (token, limit) in [("", 0), ("", 1001), ("x", 1)] {
        assert_eq!(table.page(&of, token, limit, NOW.now), Err(WeightError::InvalidArgument));
    }
}

/// Names of any length and number take bounded memory. Removed revisions make way.
#[test]
fn the_table_is_bounded() {
    let mut table = Weights::new(0);
    for number in 0..MAX_REVISIONS as u64 {
        begin(&mut table, &id("a", "r", number + 1)).unwrap();
    }
    assert_eq!(begin(&mut table, &id("b", "r", 1)), Err(WeightError::Busy));
    begin(&mut table, &id("a", "r", 1)).unwrap();
    remove(&mut table, &id("a", "r", 9));
    begin(&mut table, &id("b", "r", 1)).unwrap();
    assert_eq!(table.view(&id("a", "r", 9), NOW.now), Err(WeightError::NotFound));
    assert_eq!(table.len(), MAX_REVISIONS);

    let (mut table, mut count) = (Weights::new(0), 0);
    let long = |number: u64| id(&"q".repeat(1024), &"r".repeat(1024), number);
    while begin(&mut table, &long(count + 1)).is_ok() {
        count += 1;
    }
    assert!((1000..MAX_REVISIONS as u64).contains(&count), "{count}");
    for number in 1..=count {
        remove(&mut table, &long(number));
    }
    begin(&mut table, &long(count + 1)).unwrap();
    for number in 1..=count + 1 {
        table.forget(&long(number));
    }
    assert_eq!((table.text, table.len(), table.groups.len()), (0, 0, 0));
}

fn ready(table: &mut Weights, of: &WeightId) {
    begin(table, of).unwrap();
    let record = table.records.get_mut(of).unwrap();
    record.set(WeightAvailability::Ready, Hot);
    record.change(NOW.wall_ms).unwrap();
}

#[test]
fn leases_are_bounded_and_expired_ones_make_way() {
    let mut table = Weights::new(0);
    let of = id("a", "r", 1);
    ready(&mut table, &of);
    let ttl = Duration::from_secs(5);
    for number in 0..1024 {
        table.acquire(&of, 2, &number.to_string(), ttl, NOW).unwrap();
    }
    assert_eq!(table.acquire(&of, 2, "more", ttl, NOW), Err(WeightError::Busy));
    let again = table.acquire(&of, 2, "7", ttl, NOW).unwrap();
    assert_eq!((again.id, again.expires_ms), (8, 10_000));
    let later = Instants { now: NOW.now.after(ttl), wall_ms: 10_000 };
    assert_eq!(table.renew("default", 8, ttl, later), Err(WeightError::LeaseExpired));
    assert_eq!(table.acquire(&of, 2, "more", ttl, later).unwrap().id, 1025);
    assert_eq!(table.stats(later.now).leases, 1);
    table.release("other", 1025);
    assert_eq!(table.stats(later.now).leases, 1);
    table.release("default", 1025);
    assert_eq!(table.stats(later.now).leases, 0);
}

#[test]
fn the_last_number_of_a_change_is_not_passed() {
    let mut table = Weights::new(0);
    let of = id("a", "r", 1);
    ready(&mut table, &of);
    table.records.get_mut(&of).unwrap().revision.metadata_generation = u64::MAX;
    assert_eq!(table.delete(&of, u64::MAX, NOW), Err(WeightError::GenerationExhausted));
    let moved = table.start_move(&of, u64::MAX, Cold, |_| Ok(()), NOW);
    assert_eq!(moved, Err(WeightError::GenerationExhausted));
}

/// Ended moves are remembered, but not all of them.
#[test]
fn ended_moves_are_bounded() {
    let mut table = Weights::new(0);
    let of = id("a", "r", 1);
    ready(&mut table, &of);
    for number in 0..5000 {
        let generation = table.view(&of, NOW.now).unwrap().revision.metadata_generation;
        let moving = table.start_move(&of, generation, Cold, |_| Ok(()), NOW).unwrap();
        assert_eq!(moving.id, number + 1);
        let (due, _) = table.due(None, 100);
        table.progress(&due[0], Progress { done: 2, obstacle: None }, NOW);
        assert_eq!(table.query_move("default", moving.id).unwrap().message, "completed");
    }
    table.expire(Duration::from_secs(300), NOW);
    assert_eq!(table.query_move("default", 904), Err(WeightError::NotFound));
    assert!(table.query_move("default", 905).is_ok());
}
