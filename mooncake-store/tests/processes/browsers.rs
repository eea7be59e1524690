//! Requests of websites to every HTTP listener: what changes state is refused with 403, and
//! programs go on working.

use std::io::{Read, Write};
use std::net::TcpStream;

use crate::listeners::{client, master};
use crate::process::free_port;

/// Request as a browser or a program sends it. `{at}` stands for the address of the listener.
struct Case {
    name: &'static str,
    headers: &'static [(&'static str, &'static str)],
    /// Word of the refusal, if the request is refused.
    refused: Option<&'static str>,
}

const JSON: (&str, &str) = ("Content-Type", "application/json");
const TEXT: (&str, &str) = ("Content-Type", "text/plain");
const FORM: (&str, &str) = ("Content-Type", "application/x-www-form-urlencoded");
const OWN: (&str, &str) = ("Host", "{at}");
const EVIL: (&str, &str) = ("Origin", "http://evil.example");

const CHANGES: &[Case] = &[
    // Programs.
    Case { name: "curl", headers: &[OWN, FORM, ("User-Agent", "curl/8.0")], refused: None },
    Case { name: "curl without a body type", headers: &[OWN], refused: None },
    Case { name: "requests", headers: &[OWN, JSON, ("Accept-Encoding", "gzip, deflate")], refused: None },
    Case { name: "no host", headers: &[], refused: None },
    Case {
        name: "service of a cluster",
        headers: &[("Host", "mooncake.default.svc.cluster.local:9003")],
        refused: None,
    },
    Case { name: "short name", headers: &[("Host", "mooncake-master:9003")], refused: None },
    Case { name: "name in a domain", headers: &[("Host", "node1.corp.example:9003")], refused: None },
    // Pages of the listener itself.
    Case { name: "own page", headers: &[OWN, ("Origin", "http://{at}"), JSON], refused: None },
    Case {
        name: "own page, fetched",
        headers: &[OWN, ("Origin", "http://{at}"), ("Sec-Fetch-Site", "same-origin"), JSON],
        refused: None,
    },
    Case {
        name: "own page, given name",
        headers: &[("Host", "Given.Example:9"), ("Origin", "http://given.example:9"), JSON],
        refused: None,
    },
    Case {
        name: "own page, text",
        headers: &[OWN, ("Origin", "http://{at}"), TEXT],
        refused: Some("application/json"),
    },
    Case {
        name: "own page, form",
        headers: &[OWN, ("Origin", "http://{at}"), FORM],
        refused: Some("application/json"),
    },
    Case {
        name: "own page, no type",
        headers: &[OWN, ("Origin", "http://{at}")],
        refused: Some("application/json"),
    },
    // Pages of others.
    Case { name: "foreign origin", headers: &[OWN, EVIL, JSON], refused: Some("http://evil.example") },
    Case { name: "foreign origin, text", headers: &[OWN, EVIL, TEXT], refused: Some("http://evil.example") },
    Case { name: "foreign origin, form", headers: &[OWN, EVIL, FORM], refused: Some("http://evil.example") },
    Case {
        name: "other port",
        headers: &[OWN, ("Origin", "http://127.0.0.1:1"), JSON],
        refused: Some("http://127.0.0.1:1"),
    },
    Case { name: "null origin", headers: &[OWN, ("Origin", "null"), JSON], refused: Some("null") },
    Case { name: "empty origin", headers: &[OWN, ("Origin", ""), JSON], refused: Some("Origin") },
    Case {
        name: "two origins",
        headers: &[OWN, ("Origin", "http://{at}"), EVIL, JSON],
        refused: Some("Origin"),
    },
    Case {
        name: "cross-site",
        headers: &[OWN, ("Sec-Fetch-Site", "cross-site")],
        refused: Some("cross-site"),
    },
    Case {
        name: "same-site",
        headers: &[OWN, ("Sec-Fetch-Site", "Same-Site")],
        refused: Some("Sec-Fetch-Site"),
    },
    Case {
        name: "unknown site",
        headers: &[OWN, ("Sec-Fetch-Site", "elsewhere")],
        refused: Some("Sec-Fetch-Site"),
    },
    // DNS rebinding: the page and the listener have one name, which is not given.
    Case {
        name: "rebinding",
        headers: &[("Host", "evil.example"), EVIL, JSON],
        refused: Some("--allowed_hosts"),
    },
    Case {
        name: "rebinding, port",
        headers: &[("Host", "evil.example:9003"), ("Origin", "http://evil.example:9003"), TEXT],
        refused: Some("--allowed_hosts"),
    },
    Case {
        name: "rebinding, fetched",
        headers: &[("Host", "evil.example"), ("Sec-Fetch-Site", "same-origin")],
        refused: Some("--allowed_hosts"),
    },
    Case {
        name: "rebinding, suffix",
        headers: &[
            ("Host", "given.example.evil.example"),
            ("Origin", "http://given.example.evil.example"),
            JSON,
        ],
        refused: Some("--allowed_hosts"),
    },
    Case {
        name: "rebinding, address as a label",
        headers: &[("Host", "127.0.0.1.evil.example"), ("Origin", "http://127.0.0.1.evil.example"), JSON],
        refused: Some("--allowed_hosts"),
    },
    Case { name: "two hosts", headers: &[OWN, ("Host", "evil.example"), EVIL, JSON], refused: Some("Host") },
];

/// Sends a request and returns the status and the response.
fn send(port: u16, host: &str, (method, path, body): (&str, &str, &str), case: &Case) -> (u16, String) {
    let mut stream = TcpStream::connect((host, port)).unwrap();
    let mut head =
        format!("{method} {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {}\r\n", body.len());
    for (name, value) in case.headers {
        head.push_str(&format!("{name}: {}\r\n", value.replace("{at}", &format!("{host}:{port}"))));
    }
    stream.write_all(format!("{head}\r\n{body}").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    (answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0), answer)
}

/// Sends every request that changes state to a listener, and checks the responses. Returns how many
/// were served.
fn check(listener: &str, port: u16, requests: &[(&str, &str, &str)]) {
    for request in requests {
        for case in CHANGES {
            let what = format!("{listener} {} {}: {}", request.0, request.1, case.name);
            let (status, answer) = send(port, "127.0.0.1", *request, case);
            assert!(!answer.to_ascii_lowercase().contains("access-control-"), "{what}: {answer}");
            match case.refused {
                // The type of a body matters only where there is one.
                Some("application/json") if request.2.is_empty() => {
                    assert_ne!(status, 403, "{what}: {answer}")
                }
                Some(word) => assert!(status == 403 && answer.contains(word), "{what}: {answer}"),
                None => assert_ne!(status, 403, "{what}: {answer}"),
            }
        }
    }
}

/// Checks that reads stay open to programs, and that no page may read the responses.
fn check_reads(listener: &str, port: u16, path: &str) {
    for (headers, is_refused) in [
        (&[OWN][..], false),
        (&[("Host", "mooncake-master.ns.svc:9003")], false),
        (&[("Host", "node1.corp.example")], false),
        (&[OWN, EVIL], false),
        (&[("Host", "evil.example"), EVIL], true),
        (&[("Host", "evil.example"), ("Sec-Fetch-Site", "same-origin")], true),
    ] {
        let case = Case { name: "read", headers, refused: None };
        let (status, answer) = send(port, "127.0.0.1", ("GET", path, ""), &case);
        assert_eq!(status == 403, is_refused, "{listener} {path} {headers:?}: {answer}");
        assert!(!answer.to_ascii_lowercase().contains("access-control-"), "{listener}: {answer}");
    }
}

/// Checks that a preflight gets no permission.
fn check_preflight(listener: &str, port: u16, path: &str) {
    let headers = &[
        OWN,
        EVIL,
        ("Access-Control-Request-Method", "PUT"),
        ("Access-Control-Request-Headers", "content-type"),
    ];
    let (status, answer) =
        send(port, "127.0.0.1", ("OPTIONS", path, ""), &Case { name: "preflight", headers, refused: None });
    assert!(status >= 400, "{listener}: {answer}");
    assert!(!answer.to_ascii_lowercase().contains("access-control-allow"), "{listener}: {answer}");
}

#[test]
fn pages_of_others_change_nothing_at_a_master() {
    let (_process, ports) = master("1024:1024", &["--allowed_hosts=given.example".into()]);
    let quota = r#"{"requested_quota_bytes":1}"#;
    check(
        "admin",
        ports.admin,
        &[
            ("POST", "/api/v1/remove_all?force=1", ""),
            ("POST", "/api/v1/drain_jobs", r#"{"segments":["none"]}"#),
            ("PUT", "/api/v1/tenant_quotas?tenant_id=a", quota),
            ("DELETE", "/api/v1/tenant_quotas?tenant_id=a", ""),
            ("PATCH", "/nothing", "{}"),
        ],
    );
    check(
        "metadata",
        ports.metadata,
        &[
            ("PUT", "/metadata?key=a", r#"{"a":1}"#),
            ("DELETE", "/metadata?key=a", ""),
            ("POST", "/metadata?key=a", "{}"),
        ],
    );
    for (listener, port, path) in [
        ("admin", ports.admin, "/metrics"),
        ("admin", ports.admin, "/get_all_keys"),
        ("metadata", ports.metadata, "/health"),
    ] {
        check_reads(listener, port, path);
        check_preflight(listener, port, path);
    }
    check_preflight("metadata", ports.metadata, "/metadata?key=a");
}

#[test]
fn pages_of_others_change_nothing_at_a_client() {
    let (_master, ports) = master("1024:1024", &["--enable_offload=true".into()]);
    let (http, folder) = (free_port(), tempfile::tempdir().unwrap());
    let (_process, _) = client(&ports, (free_port(), http), folder.path());
    check("pages", http, &[("POST", "/health", "{}")]);
    check_reads("pages", http, "/metrics");
    check_preflight("pages", http, "/health");
}
