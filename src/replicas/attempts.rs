//! Which replicas failed a request, from the little that Envoy tells of it.
//!
//! A filter sees the final response alone. Envoy walks the ordered list, one entry per attempt,
//! so the number of attempts and the last address tell who had it before. What those did is not
//! known, only that it was worth a retry; so they count as failed for certain only when another
//! replica then answered well. It judges one request; what follows from it is
//! [`super::strikes`]'.

use super::strikes::Proof;
use crate::headers::Headers;

/// What Envoy tells when the response's head is there.
#[derive(Debug, Clone, Copy, Default)]
pub struct Seen<'a> {
    /// The response's status.
    pub status: u16,
    /// `response.code_details`.
    pub details: &'a str,
    /// `upstream.request_attempt_count`.
    pub attempts: u64,
    /// `upstream.address`, the last that was tried.
    pub address: &'a str,
}

/// What `response.code_details` says of an answer that came from a replica.
pub const VIA_UPSTREAM: &str = "via_upstream";

/// What Envoy adds to the head of an answer that came from a replica, unless `suppress_envoy_headers` keeps it from that.
const SERVICE_TIME: &str = "x-envoy-upstream-service-time";

/// Whether a response is so plainly a replica's that its code details need not be asked: they cost every request a call.
/// Envoy's own answers have a status of their own as a rule, but `local_reply_config` and other filters give them any.
pub fn is_plainly_upstreams(status: u16, headers: &Headers) -> bool {
    (200..300).contains(&status) && !headers.lacks(SERVICE_TIME)
}

/// One replica that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure<'a> {
    /// Its address.
    pub address: &'a str,
    /// How it shows.
    pub kind: FailureKind,
}

/// How a failure shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// Another replica answered the same request well.
    Spared,
    /// It could not be connected to.
    Connection,
    /// Its error is what the client got, or it cut the request, and nobody did better.
    Error,
}

impl FailureKind {
    /// The value of the metric's `kind` label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Spared => "spared",
            Self::Connection => "connection",
            Self::Error => "error",
        }
    }

    /// How much it proves.
    pub fn proof(self) -> Proof {
        match self {
            Self::Spared | Self::Connection => Proof::Proven,
            Self::Error => Proof::Unproven,
        }
    }
}

/// What one request tells of the replicas that had it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Attempts<'a> {
    /// Who failed it.
    pub failed: Vec<Failure<'a>>,
    /// Who answered it, be it with an error.
    pub answered: Option<&'a str>,
    /// Whether that was an answer as it should be.
    pub is_success: bool,
}

impl<'a> Attempts<'a> {
    /// Reads who had a request that was sent with this ordered list.
    pub fn read(list: &[&'a str], seen: &Seen<'a>) -> Self {
        let Some(last) = Last::of(seen) else { return Self::default() };
        let mut found = Self {
            failed: Vec::new(),
            answered: (!matches!(last, Last::Absent | Last::Cut)).then_some(seen.address),
            is_success: last == Last::Well,
        };
        let before = match last {
            Last::Well => Some(FailureKind::Spared),
            Last::Failed | Last::Absent | Last::Cut => Some(FailureKind::Error),
            // Whoever refuses a request may be right, and then so were the ones before.
            Last::Refused => None,
        };
        if let Some(kind) = before {
            let earlier = earlier(list, seen);
            found.failed.extend(earlier.map(|address| Failure { address, kind }));
        }
        let kind = match last {
            Last::Failed | Last::Cut => FailureKind::Error,
            Last::Absent => FailureKind::Connection,
            Last::Well | Last::Refused => return found,
        };
        found.failed.push(Failure { address: seen.address, kind });
        found
    }
}

/// What the last replica did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Last {
    /// Answered as it should.
    Well,
    /// Refused the request, or was too busy for it: 4xx, 429 among them.
    Refused,
    /// Answered with an error of its own.
    Failed,
    /// Could not be connected to: the request has not reached it.
    Absent,
    /// Had the request, and cut it before an answer. The request may be what broke it.
    Cut,
}

/// How it is told that there was no connection to the replica. Envoy also resets requests for
/// reasons of its own (too many of them, a limit, a protocol it dislikes).
const ABSENT: [&str; 4] =
    ["remote_connection_failure", "connection_failure", "connection_timeout", "connect_error"];

/// How it is told that the replica, or its machine, ended a request that it had.
const CUT: [&str; 3] = ["connection_termination", "remote_reset", "remote_refused_stream_reset"];

impl Last {
    /// `None` when the response tells nothing of a replica.
    fn of(seen: &Seen<'_>) -> Option<Self> {
        if seen.address.is_empty() {
            return None;
        }
        if seen.details == VIA_UPSTREAM {
            return match seen.status {
                100..400 => Some(Self::Well),
                400..500 => Some(Self::Refused),
                500 | 502..=504 => Some(Self::Failed),
                // Not implemented, version not supported: nothing is wrong with the replica.
                _ => Some(Self::Refused),
            };
        }
        let reset = seen.details.strip_prefix("upstream_reset_before_response_started{")?;
        let end = reset.find(['|', ',', '}']).unwrap_or(reset.len());
        let by = reset.get(..end)?.trim();
        if ABSENT.contains(&by) {
            return Some(Self::Absent);
        }
        CUT.contains(&by).then_some(Self::Cut)
    }
}

/// The entries of the list that had the request before the last address did.
///
/// Envoy skips entries it does not know, so the attempts and the last address's place must agree;
/// where they do not, nobody is named.
fn earlier<'l, 'a>(list: &'l [&'a str], seen: &Seen<'_>) -> impl Iterator<Item = &'a str> + 'l {
    let attempts = usize::try_from(seen.attempts).unwrap_or(usize::MAX);
    let place = list.iter().position(|address| *address == seen.address);
    let tried = match place {
        // Behind the list's end Envoy chooses on its own, at worst one that was on it.
        _ if attempts > list.len() => list.len(),
        Some(place) if attempts == place + 1 => place,
        _ => 0,
    };
    let last = seen.address.to_owned();
    list.iter().take(tried).copied().filter(move |address| *address != last)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: [&str; 3] = ["a:1", "b:1", "c:1"];
    const REFUSED: &str = "upstream_reset_before_response_started{remote_connection_failure|\
                           delayed_connect_error:_Connection_refused}";

    #[track_caller]
    fn check(
        (status, details, attempts, address): (u16, &str, u64, &str),
        failed: &[(&str, FailureKind)],
        answered: Option<&str>,
    ) {
        let found = Attempts::read(&LIST, &Seen { status, details, attempts, address });
        let found_failed: Vec<_> = found.failed.iter().map(|f| (f.address, f.kind)).collect();
        assert_eq!((found_failed.as_slice(), found.answered), (failed, answered));
    }

    #[test]
    fn only_a_success_that_is_marked_need_not_be_asked_about() {
        let marked = Headers::of(&[(":status", "200"), ("x-envoy-upstream-service-time", "7")]);
        let bare = Headers::of(&[(":status", "200")]);
        let cases = [(200, &marked, true), (299, &marked, true), (200, &bare, false)];
        for (status, headers, expected) in cases.into_iter().chain([(503, &marked, false)]) {
            assert_eq!(is_plainly_upstreams(status, headers), expected, "{status}");
        }
        // Where no headers can be read, it is as it mostly is.
        assert!(is_plainly_upstreams(200, &Headers::default()));
    }

    #[test]
    fn who_comes_before_a_good_answer_failed_for_certain() {
        use FailureKind::Spared;
        check((200, "via_upstream", 1, "a:1"), &[], Some("a:1"));
        check((200, "via_upstream", 2, "b:1"), &[("a:1", Spared)], Some("b:1"));
        check((200, "via_upstream", 3, "c:1"), &[("a:1", Spared), ("b:1", Spared)], Some("c:1"));
        let all = LIST.map(|address| (address, Spared));
        check((200, "via_upstream", 4, "other:1"), &all, Some("other:1"));
        check((200, "via_upstream", 5, "b:1"), &[all[0], all[2]], Some("b:1"));
    }

    #[test]
    fn an_error_that_the_client_gets_proves_nothing() {
        use FailureKind::Error;
        for status in [500, 502, 503, 504] {
            check((status, "via_upstream", 1, "a:1"), &[("a:1", Error)], Some("a:1"));
        }
        let two = [("a:1", Error), ("b:1", Error)];
        check((500, "via_upstream", 2, "b:1"), &two, Some("b:1"));
    }

    #[test]
    fn a_refusal_is_nobodys_failure() {
        for status in [400, 404, 413, 422, 429, 501, 505] {
            check((status, "via_upstream", 1, "a:1"), &[], Some("a:1"));
            check((status, "via_upstream", 3, "c:1"), &[], Some("c:1"));
        }
    }

    #[test]
    fn a_replica_that_cannot_be_reached_failed_for_certain() {
        use FailureKind::{Connection, Error};
        check((503, REFUSED, 1, "a:1"), &[("a:1", Connection)], None);
        check((503, REFUSED, 2, "b:1"), &[("a:1", Error), ("b:1", Connection)], None);
    }

    #[test]
    fn a_request_that_every_replica_cuts_may_be_what_breaks_them() {
        use FailureKind::{Error, Spared};
        for by in CUT {
            let cut = format!("upstream_reset_before_response_started{{{by}|more}}");
            check((503, &cut, 1, "a:1"), &[("a:1", Error)], None);
            let all = LIST.map(|address| (address, Error));
            check((503, &cut, 3, "c:1"), &all, None);
        }
        check((200, "via_upstream", 2, "b:1"), &[("a:1", Spared)], Some("b:1"));
    }

    #[test]
    fn what_envoy_answers_for_reasons_of_its_own_tells_nothing() {
        for details in [
            "",
            "upstream_reset_before_response_started{overflow}",
            "upstream_reset_before_response_started{local_reset}",
            "upstream_reset_before_response_started{local_connection_failure}",
            "upstream_reset_before_response_started{",
            "upstream_response_timeout",
            "upstream_per_try_timeout",
            "no_healthy_upstream",
            "request_payload_too_large",
            "stream_idle_timeout",
        ] {
            check((503, details, 2, "b:1"), &[], None);
        }
        check((200, "via_upstream", 1, ""), &[], None);
    }

    #[test]
    fn attempts_that_do_not_fit_the_list_accuse_nobody() {
        // Envoy did not know the first entry.
        check((200, "via_upstream", 1, "b:1"), &[], Some("b:1"));
        check((200, "via_upstream", 2, "c:1"), &[], Some("c:1"));
        check((200, "via_upstream", 2, "other:1"), &[], Some("other:1"));
        check((200, "via_upstream", 0, "a:1"), &[], Some("a:1"));
    }
}
