//! Forms of keys inside a master, in inventories and in snapshots.
//!
//! The keys of one master have one form. A client or a snapshot may hold keys of a master that was
//! started with another `--enable_multi_tenants` than the present one.

use super::api::DEFAULT_TENANT;

/// Form of the keys and the names of groups of one master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyForm {
    /// Keys as clients give them.
    Plain,
    /// Keys behind the name of their tenant and a NUL.
    WithTenant,
}

impl KeyForm {
    /// Returns the form of a master with or without tenants.
    pub fn of_master(has_tenants: bool) -> Self {
        if has_tenants { Self::WithTenant } else { Self::Plain }
    }

    /// Returns the form of keys of an unknown master: plain, because a key with a tenant has a NUL.
    /// Returns `None` if a key has a NUL, which plain keys may have, too.
    pub fn of_keys<'a>(mut keys: impl Iterator<Item = &'a [u8]>) -> Option<Self> {
        keys.all(|key| !key.contains(&0)).then_some(Self::Plain)
    }

    /// Converts the key and the group of an object of this form. Plain keys belong to the tenant
    /// `default`. Returns false, and changes nothing, for an object of another tenant, which has no
    /// plain key.
    pub fn convert(self, to: Self, key: &mut Vec<u8>, group: &mut String) -> bool {
        let prefix = format!("{DEFAULT_TENANT}\0");
        match (self, to) {
            (Self::Plain, Self::WithTenant) => {
                key.splice(..0, prefix.bytes());
                if !group.is_empty() {
                    group.insert_str(0, &prefix);
                }
            }
            (Self::WithTenant, Self::Plain) => {
                if !key.starts_with(prefix.as_bytes()) {
                    return false;
                }
                key.drain(..prefix.len());
                if group.starts_with(&prefix) {
                    group.drain(..prefix.len());
                }
            }
            (Self::Plain, Self::Plain) | (Self::WithTenant, Self::WithTenant) => {}
        }
        true
    }

    /// Returns whether an object with this key of this form has a key in every form.
    pub fn is_convertible(self, key: &[u8]) -> bool {
        let of_default =
            || key.strip_prefix(DEFAULT_TENANT.as_bytes()).is_some_and(|rest| rest.first() == Some(&0));
        self == Self::Plain || of_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use KeyForm::{Plain, WithTenant};

    fn converted(from: KeyForm, to: KeyForm, key: &str, group: &str) -> Option<(String, String)> {
        let (mut new_key, mut new_group) = (key.as_bytes().to_vec(), group.to_owned());
        let is_converted = from.convert(to, &mut new_key, &mut new_group);
        let new = (String::from_utf8(new_key).unwrap(), new_group);
        assert!(is_converted || new == (key.to_owned(), group.to_owned()));
        assert_eq!(from.is_convertible(key.as_bytes()), is_converted || from == to);
        is_converted.then_some(new)
    }

    #[test]
    fn plain_keys_are_those_of_the_default_tenant() {
        let some = |key: &str, group: &str| Some((key.to_owned(), group.to_owned()));
        assert_eq!(converted(Plain, WithTenant, "k", "g"), some("default\0k", "default\0g"));
        assert_eq!(converted(Plain, WithTenant, "a\0k", ""), some("default\0a\0k", ""));
        assert_eq!(converted(WithTenant, Plain, "default\0k", "default\0g"), some("k", "g"));
        assert_eq!(converted(WithTenant, Plain, "default\0a\0k", ""), some("a\0k", ""));
        assert_eq!(converted(WithTenant, Plain, "defaults\0k", "defaults\0g"), None);
        assert_eq!(converted(Plain, Plain, "blue\0k", "g"), some("blue\0k", "g"));
    }

    #[test]
    fn keys_with_a_nul_may_be_of_either_form() {
        assert_eq!(KeyForm::of_keys([&b"a"[..], b"b"].into_iter()), Some(Plain));
        assert_eq!(KeyForm::of_keys([&b"a"[..], b"a\0b"].into_iter()), None);
    }
}
