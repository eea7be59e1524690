//! Objects of a master that was started with another `--enable_multi_tenants` than the present one.

use mooncake_protocol::key_form::KeyForm;
use mooncake_protocol::wire::HeldObjects;

use super::Inventory;
use super::journal::Journal;

impl Inventory {
    /// Returns the form of the keys of the retained objects.
    fn retained_form(&self) -> Option<KeyForm> {
        self.key_form.or_else(|| KeyForm::of_keys(self.retained.values().map(|entry| &*entry.stored.key)))
    }

    /// Describes the retained objects for the master.
    pub(crate) fn held_objects(&self) -> Option<HeldObjects> {
        let form = self.retained_form().filter(|_| !self.retained.is_empty())?;
        let is_of_default = |entry: &&super::Entry| form.is_convertible(&entry.stored.key);
        let of_default = self.retained.values().filter(is_of_default).count();
        Some(HeldObjects {
            has_tenants: form == KeyForm::WithTenant,
            of_default: of_default as u64,
            of_others: (self.retained.len() - of_default) as u64,
        })
    }

    /// Converts the keys of the retained objects to the form of the present master. An object that
    /// has no key of that form is dropped.
    pub(crate) fn adopt_key_form(&mut self, to: KeyForm) {
        let from = self.retained_form();
        self.key_form = Some(to);
        let Some(from) = from.filter(|from| *from != to && !self.retained.is_empty()) else { return };
        let before = self.retained.len();
        self.retained.retain(|_, entry| {
            let stored = &mut entry.stored;
            from.convert(to, &mut stored.key, &mut stored.group)
        });
        self.journal.iter_mut().for_each(Journal::request_rewrite);
        let (converted, dropped) = (self.retained.len(), before - self.retained.len());
        tracing::warn!(
            converted,
            dropped,
            "the master has another --enable_multi_tenants than the one before"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use mooncake_core::clock::Moment;
    use mooncake_core::ids::ReplicaId;

    use super::super::tests::report;
    use super::*;

    /// Returns the inventory of a client of a master with these keys, which a new master follows.
    fn followed(form: Option<KeyForm>, keys: &[&str]) -> Inventory {
        let mut inventory = Inventory { epoch: Some(1), key_form: form, ..Inventory::default() };
        let numbers: Vec<u64> = (1..=keys.len() as u64).collect();
        inventory.apply(report(1, &numbers), Moment(0));
        for (number, key) in numbers.iter().zip(keys) {
            inventory.entries.get_mut(&ReplicaId(10 + number)).unwrap().stored.key = key.as_bytes().to_vec();
        }
        inventory.turn_over(2);
        inventory
    }

    fn keys(inventory: &Inventory) -> BTreeSet<&str> {
        inventory.retained.values().map(|entry| std::str::from_utf8(&entry.stored.key).unwrap()).collect()
    }

    #[test]
    fn keys_follow_the_setting_of_the_master() {
        use KeyForm::{Plain, WithTenant};
        for (from, to, before, after) in [
            (Some(Plain), WithTenant, &["k", "a\0l"][..], &["default\0k", "default\0a\0l"][..]),
            (Some(WithTenant), Plain, &["default\0k", "blue\0l"], &["k"]),
            (Some(WithTenant), WithTenant, &["default\0k", "blue\0l"], &["default\0k", "blue\0l"]),
            (None, WithTenant, &["k", "l"], &["default\0k", "default\0l"]),
            (None, WithTenant, &["k", "blue\0l"], &["k", "blue\0l"]),
        ] {
            let mut inventory = followed(from, before);
            let held = inventory.held_objects();
            let others = before.iter().filter(|key| key.starts_with("blue")).count() as u64;
            assert_eq!(
                held.map(|held| held.of_default),
                held.map(|_| before.len() as u64 - others),
                "{before:?}"
            );
            inventory.adopt_key_form(to);
            assert_eq!(keys(&inventory), after.iter().copied().collect(), "{before:?}");
            assert_eq!(inventory.key_form, Some(to));
        }
    }
}
