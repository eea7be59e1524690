//! Requests of websites to HTTP listeners: which ones are refused.
//!
//! A browser on the machine of an operator reaches ports that its websites cannot. A page may send
//! requests there without asking (`fetch` with `no-cors`, forms). The headers `Origin`,
//! `Sec-Fetch-Site` and `Host` tell requests that change state from those of programs.
//!
//! A page whose name resolves to the address of a listener (DNS rebinding) may read the responses,
//! too. Over plain HTTP, browsers send its `GET` with neither `Origin` nor `Sec-Fetch-Site`, as
//! programs do, and only `Host` has the name of the website. [`Guard::Everything`] refuses such a
//! name. [`Guard::Changes`] does not, because programs may use any name, so such a page reads what
//! the listener serves to `GET`.

use std::borrow::Cow;
use std::net::IpAddr;
use std::str::FromStr;

use crate::fault_injection::is_planted;
use crate::host_port;

/// Longest part of a header in a refusal, in characters.
const SHOWN: usize = 128;
/// Endings of names that public DNS cannot have: services of Kubernetes, and names that are
/// reserved for private networks.
const PRIVATE: [&str; 4] = [".localhost", ".svc", ".svc.cluster.local", ".internal"];

/// Names by which a listener may be called, beside addresses, `localhost`, and names that public
/// DNS cannot have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowedHosts {
    /// Names in lower case. A name that begins with a dot stands for every name below it.
    names: Vec<String>,
    allows_any: bool,
}

impl AllowedHosts {
    /// Adds the host of a name or address. A port, and an empty name, are ignored.
    #[must_use]
    pub fn with(mut self, name: &str) -> Self {
        let host = normal(host_port::split(name).0);
        if !host.is_empty() {
            self.names.push(host.into_owned());
        }
        self
    }

    /// Adds the name of this machine.
    #[must_use]
    pub fn with_own_name(self) -> Self {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        self.with(name.trim())
    }

    /// Returns whether a request may call the listener by this `Host`.
    fn has(&self, host: &str) -> bool {
        if self.allows_any || is_planted("any-host") {
            return true;
        }
        // An IPv6 address is in brackets. A port may follow the host.
        let (host, port) = match host.strip_prefix('[').map(|rest| rest.split_once(']')) {
            Some(None) => return false,
            Some(Some((host, port))) => (host, port),
            None => host.split_at(host.find(':').unwrap_or(host.len())),
        };
        let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
        if !port.is_empty() && !port.strip_prefix(':').is_some_and(is_port) {
            return false;
        }
        if host.parse::<IpAddr>().is_ok() {
            return true;
        }
        let host = normal(host);
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if host.is_empty() || !host.chars().all(is_name) {
            return false;
        }
        let is_below = |name: &str| name.starts_with('.') && host.ends_with(name);
        // A name without a dot has no meaning in public DNS.
        !host.contains('.')
            || PRIVATE.iter().any(|private| is_below(private))
            || self.names.iter().any(|name| *name == host || is_below(name))
    }
}

/// Returns a name in lower case, without the dot of the root.
fn normal(host: &str) -> Cow<'_, str> {
    let host = host.strip_suffix('.').unwrap_or(host);
    match host.bytes().any(|byte| byte.is_ascii_uppercase()) {
        true => host.to_ascii_lowercase().into(),
        false => host.into(),
    }
}

impl FromStr for AllowedHosts {
    type Err = String;

    /// Parses names with commas between them. `*` allows every name, and `*.name` every name below
    /// another one.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut hosts = Self::default();
        for name in text.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.:[]".contains(c);
            match name.strip_prefix('*') {
                Some("") => hosts.allows_any = true,
                Some(rest) if rest.len() > 1 && rest.starts_with('.') && rest.chars().all(is_name) => {
                    hosts = hosts.with(rest);
                }
                None if name.chars().all(is_name) && !name.starts_with('.') => hosts = hosts.with(name),
                _ => return Err(format!("{name:?} is not a host name, *.name or *")),
            }
        }
        Ok(hosts)
    }
}

/// Occurrences of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Header<'a> {
    Absent,
    One(&'a [u8]),
    Several,
}

impl<'a> Header<'a> {
    fn add(&mut self, value: &'a [u8]) {
        *self = if *self == Self::Absent { Self::One(value) } else { Self::Several };
    }

    /// Returns the value as text, if there is exactly one and it is ASCII.
    fn text(self) -> Option<&'a str> {
        match self {
            Self::One(value) => std::str::from_utf8(value).ok().map(str::trim).filter(|text| text.is_ascii()),
            Self::Absent | Self::Several => None,
        }
    }

    fn shown(self) -> String {
        match self {
            Self::Absent => String::new(),
            Self::One(value) => {
                String::from_utf8_lossy(value).chars().take(SHOWN).flat_map(char::escape_default).collect()
            }
            Self::Several => "(several)".into(),
        }
    }
}

/// Requests that a listener refuses if the page of another site sends them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard {
    /// Requests that change state. The page of another origin cannot read other responses, because
    /// no response permits it to. A page that has the address of the listener under its own name
    /// (DNS rebinding) can read them. Programs may call the listener by any name.
    Changes,
    /// All requests. Programs, too, call the listener by an allowed name.
    Everything,
}

/// Headers of a request that distinguish the requests of websites from others.
#[derive(Clone, Copy, Debug)]
pub struct RequestHead<'a> {
    method: &'a str,
    /// Host of the request line, if it has one.
    authority: Option<&'a str>,
    host: Header<'a>,
    origin: Header<'a>,
    site: Header<'a>,
    content_type: Header<'a>,
    has_body: bool,
}

impl<'a> RequestHead<'a> {
    /// Collects the headers of a request. `authority` is the host of the request line, which only
    /// requests to proxies have.
    pub fn new(
        method: &'a str,
        authority: Option<&'a str>,
        headers: impl IntoIterator<Item = (&'a str, &'a [u8])>,
    ) -> Self {
        let none = Header::Absent;
        let mut head = Self {
            method,
            authority,
            host: none,
            origin: none,
            site: none,
            content_type: none,
            has_body: false,
        };
        for (name, value) in headers {
            let is = |other: &str| name.eq_ignore_ascii_case(other);
            if is("host") {
                head.host.add(value);
            } else if is("origin") {
                head.origin.add(value);
            } else if is("sec-fetch-site") {
                head.site.add(value);
            } else if is("content-type") {
                head.content_type.add(value);
            } else if is("transfer-encoding") || (is("content-length") && value != b"0") {
                head.has_body = true;
            }
        }
        head
    }

    /// Returns why the request is refused, with the header and what to do; `None` if it is served.
    pub fn refusal(&self, hosts: &AllowedHosts, guard: Guard) -> Option<String> {
        if is_planted("pages-of-others") {
            return None;
        }
        let is_read = matches!(self.method, "GET" | "HEAD");
        let is_guarded = !is_read || guard == Guard::Everything;
        let refuse = |reason: &str, header: &str, value: Header<'_>, advice: &str| {
            Some(format!("cannot serve request: {reason}. {header}={}; {advice}\n", value.shown()))
        };
        let pages = "only programs and pages of this server may send it";
        for (header, value) in [("Origin", self.origin), ("Host", self.host), ("Sec-Fetch-Site", self.site)] {
            if value == Header::Several {
                return refuse("a header occurs more than once", header, value, pages);
            }
        }
        let site = self.site.text().map(str::to_ascii_lowercase);
        let is_own_site = matches!(site.as_deref(), Some("same-origin" | "none"));
        if is_guarded && self.site != Header::Absent && !is_own_site {
            return refuse("it comes from the page of another site", "Sec-Fetch-Site", self.site, pages);
        }
        if is_guarded && self.origin != Header::Absent && !self.has_own_origin() {
            return refuse("it comes from the page of another origin", "Origin", self.origin, pages);
        }
        // A typed address has no other page behind it that could read the response.
        let is_typed = is_read && site.as_deref() == Some("none");
        let is_of_page = self.origin != Header::Absent || (self.site != Header::Absent && !is_typed);
        if (is_of_page || guard == Guard::Everything) && !self.has_allowed_host(hosts, is_of_page) {
            let advice = "give the name to the server with --allowed_hosts, or use an address";
            return refuse("the host is not a name that was given to this server", "Host", self.host, advice);
        }
        let is_browser = self.origin != Header::Absent || self.site != Header::Absent;
        if is_browser && !is_read && self.has_body && !self.is_json() {
            return refuse(
                "the type of the body is another one",
                "Content-Type",
                self.content_type,
                "pages send application/json",
            );
        }
        None
    }

    /// Returns whether the origin is that of the server by the name of `Host`.
    fn has_own_origin(&self) -> bool {
        let (Some(origin), Some(host)) = (self.origin.text(), self.host.text()) else { return false };
        let Some((scheme, authority)) = origin.split_once("://") else { return false };
        let default = match &*scheme.to_ascii_lowercase() {
            "http" => ":80",
            "https" => ":443",
            _ => return false,
        };
        let plain = |text: &str| text.strip_suffix(default).unwrap_or(text).to_ascii_lowercase();
        !authority.is_empty() && plain(authority) == plain(host)
    }

    fn has_allowed_host(&self, hosts: &AllowedHosts, is_of_page: bool) -> bool {
        let is_allowed = match self.host {
            // No browser leaves the header out.
            Header::Absent => !is_of_page,
            _ => self.host.text().is_some_and(|host| hosts.has(host)),
        };
        is_allowed && self.authority.is_none_or(|authority| hosts.has(authority))
    }

    fn is_json(&self) -> bool {
        let Some(text) = self.content_type.text() else { return false };
        let media = text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        media == "application/json" || (media.starts_with("application/") && media.ends_with("+json"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(hosts: &str, host: &str) -> bool {
        hosts.parse::<AllowedHosts>().unwrap().has(host)
    }

    #[test]
    fn addresses_and_private_names_are_allowed() {
        for host in [
            "127.0.0.1",
            "10.1.2.3:9003",
            "[::1]",
            "[fd00::1]:80",
            "localhost",
            "LocalHost:8080",
            "a.localhost",
            "mooncake",
            "mooncake.default.svc",
            "mooncake.default.svc.cluster.local:9003",
            "ip-10-0-0-1.ec2.internal",
        ] {
            assert!(allowed("", host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "evil.example:80",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "svc.evil.example",
            "evil.example.",
            "[evil.example]",
            "a b",
            "127.0.0.1:80@evil.example",
            "evil.local",
            "[::1",
            "[::1]x",
            "127.0.0.1:x",
            "evil.example:80:80",
            "a/b",
        ] {
            assert!(!allowed("", host), "{host}");
        }
    }

    #[test]
    fn names_are_allowed_as_they_are_given() {
        let given = "Node1.corp.example:9003, *.lab.example";
        for (host, is_allowed) in [
            ("node1.corp.example", true),
            ("NODE1.corp.example.:7", true),
            ("node2.corp.example", false),
            ("a.lab.example", true),
            ("lab.example", false),
            ("evillab.example", false),
            ("xnode1.corp.example", false),
        ] {
            assert_eq!(allowed(given, host), is_allowed, "{host}");
        }
        assert!(allowed("*", "evil.example"));
        for wrong in ["a b", "http://a", "*a", "*.", ".a", "a/b"] {
            assert!(wrong.parse::<AllowedHosts>().is_err(), "{wrong}");
        }
        let own = AllowedHosts::default().with("node.corp.example:12345").with("");
        assert!(own.has("node.corp.example:1") && !own.has(""));
    }

    fn refusal(method: &str, guard: Guard, headers: &[(&str, &str)]) -> Option<String> {
        let headers = headers.iter().map(|(name, value)| (*name, value.as_bytes()));
        RequestHead::new(method, None, headers).refusal(&"given.example".parse().unwrap(), guard)
    }

    #[test]
    fn programs_use_any_name_unless_reads_are_guarded() {
        for method in ["GET", "PUT", "DELETE"] {
            let by =
                |host| refusal(method, Guard::Changes, &[("host", host), ("content-type", "text/plain")]);
            assert_eq!(by("node.corp.example:1"), None);
            let by = |host| refusal(method, Guard::Everything, &[("host", host), ("content-length", "5")]);
            assert!(by("node.corp.example").is_some_and(|text| text.contains("--allowed_hosts")));
            assert_eq!(by("127.0.0.1:80"), None);
            assert_eq!(by("given.example:80"), None);
            assert_eq!(refusal(method, Guard::Everything, &[]), None);
        }
    }

    #[test]
    fn reads_of_pages_are_refused_where_they_are_guarded() {
        let own = ("host", "127.0.0.1:80");
        for foreign in
            [("origin", "http://evil.example"), ("sec-fetch-site", "cross-site"), ("origin", "null")]
        {
            assert_eq!(refusal("GET", Guard::Changes, &[own, foreign]), None);
            assert!(refusal("GET", Guard::Everything, &[own, foreign]).is_some());
            assert!(refusal("POST", Guard::Changes, &[own, foreign]).is_some());
        }
        let typed = [("host", "node.corp.example"), ("sec-fetch-site", "none")];
        assert_eq!(refusal("GET", Guard::Changes, &typed), None);
        assert!(refusal("GET", Guard::Everything, &typed).is_some());
    }

    #[test]
    fn own_pages_send_json() {
        let own = |kind: &str| {
            refusal(
                "POST",
                Guard::Changes,
                &[("host", "h:80"), ("origin", "http://H"), ("content-type", kind), ("content-length", "2")],
            )
        };
        for good in ["application/json", "Application/JSON; charset=utf-8", "application/merge-patch+json"] {
            assert_eq!(own(good), None, "{good}");
        }
        for bad in ["", "text/plain", "text/plain;application/json", "multipart/form-data; boundary=json"] {
            assert!(own(bad).is_some_and(|text| text.contains("Content-Type")), "{bad}");
        }
    }

    #[test]
    fn refusals_show_headers_without_control_characters() {
        let headers = [("host", &b"127.0.0.1"[..]), ("origin", b"http://a\x1b\xff")];
        let head = RequestHead::new("POST", None, headers);
        let text = head.refusal(&AllowedHosts::default(), Guard::Changes).unwrap();
        assert!(text.trim_end().chars().all(|c| c.is_ascii() && !c.is_control()), "{text:?}");
        let proxied = RequestHead::new("GET", Some("evil.example"), [("host", &b"127.0.0.1"[..])]);
        assert!(proxied.refusal(&AllowedHosts::default(), Guard::Everything).is_some());
    }
}
