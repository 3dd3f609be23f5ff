//! What happens to a fleet while it works: restarts, caches that shrink, replicas that slow down, join or leave, and
//! reports that stop.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// One event of that kind.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fault {
    /// When, from the start.
    pub at: Duration,
    /// What.
    pub what: What,
}

/// What happens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum What {
    /// The process ends: what it has in flight fails, and after a time without it a new one has an empty cache.
    Restart {
        /// Which replica.
        replica: usize,
        /// For how long there is none.
        down: Duration,
    },
    /// Its cache has so many blocks from now on. It goes on reporting as many as it began with.
    Cache {
        /// Which replica.
        replica: usize,
        /// Blocks.
        blocks: u32,
    },
    /// It is so many times as fast as its configuration says.
    Speed {
        /// Which replica.
        replica: usize,
        /// How many times.
        times: f64,
    },
    /// No replica reports.
    Silence {
        /// For how long.
        lasting: Duration,
    },
    /// It was not there before.
    Join {
        /// Which replica.
        replica: usize,
    },
    /// It takes no new request, and finishes those it has.
    Drain {
        /// Which replica.
        replica: usize,
    },
}

impl FromStr for Fault {
    type Err = String;

    /// `SECONDS:restart:REPLICA:SECONDS`, `SECONDS:cache:REPLICA:BLOCKS`, `SECONDS:speed:REPLICA:TIMES`,
    /// `SECONDS:silence:SECONDS`, `SECONDS:join:REPLICA` or `SECONDS:drain:REPLICA`; replicas count from 1.
    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split(':').collect();
        let (at, what) = match parts.as_slice() {
            [at, "restart", replica, down] => {
                (at, What::Restart { replica: number(replica)?, down: seconds(down)? })
            }
            [at, "cache", replica, blocks] => {
                let blocks = blocks.parse().map_err(|_| wrong("a number of blocks", blocks))?;
                (at, What::Cache { replica: number(replica)?, blocks })
            }
            [at, "speed", replica, times] => {
                let speed = times.parse().ok().filter(|times| *times > 0.0 && *times < 1e6);
                let times = speed.ok_or_else(|| wrong("a positive number", times))?;
                (at, What::Speed { replica: number(replica)?, times })
            }
            [at, "silence", lasting] => (at, What::Silence { lasting: seconds(lasting)? }),
            [at, "join", replica] => (at, What::Join { replica: number(replica)? }),
            [at, "drain", replica] => (at, What::Drain { replica: number(replica)? }),
            _ => return Err(wrong("such as 20:restart:3:5", text)),
        };
        Ok(Self { at: seconds(at)?, what })
    }
}

impl What {
    /// The replica that it happens to; `None` when it is the whole fleet.
    pub fn replica(self) -> Option<usize> {
        match self {
            Self::Restart { replica, .. }
            | Self::Cache { replica, .. }
            | Self::Speed { replica, .. }
            | Self::Join { replica }
            | Self::Drain { replica } => Some(replica),
            Self::Silence { .. } => None,
        }
    }
}

fn wrong(expected: &str, found: impl fmt::Display) -> String {
    format!("expected {expected}, found \"{found}\"")
}

fn number(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().and_then(|number: usize| number.checked_sub(1));
    number.ok_or_else(|| wrong("a replica's number", text))
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|text| Duration::try_from_secs_f64(text).ok());
    seconds.ok_or_else(|| wrong("seconds", text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: Result<(u64, What), &str>) {
        let expected = expected.map(|(at, what)| Fault { at: Duration::from_millis(at), what });
        assert_eq!(text.parse(), expected.map_err(str::to_owned));
    }

    #[test]
    fn each_fault_has_a_text() {
        let down = Duration::from_secs(5);
        check("20:restart:3:5", Ok((20_000, What::Restart { replica: 2, down })));
        check("0.5:cache:1:1000", Ok((500, What::Cache { replica: 0, blocks: 1000 })));
        check("1:speed:2:0.5", Ok((1000, What::Speed { replica: 1, times: 0.5 })));
        check("1:silence:5", Ok((1000, What::Silence { lasting: down })));
        check("1:join:8", Ok((1000, What::Join { replica: 7 })));
        check("1:drain:8", Ok((1000, What::Drain { replica: 7 })));
    }

    #[test]
    fn a_wrong_fault_is_told_what_is_wrong() {
        check("20:restart:3", Err(r#"expected such as 20:restart:3:5, found "20:restart:3""#));
        check("20:join:0", Err(r#"expected a replica's number, found "0""#));
        check("-1:join:1", Err(r#"expected seconds, found "-1""#));
        check("1:speed:1:0", Err(r#"expected a positive number, found "0""#));
        check("1:cache:1:x", Err(r#"expected a number of blocks, found "x""#));
    }
}
