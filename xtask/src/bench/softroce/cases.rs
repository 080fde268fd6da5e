//! What is compared: a test of each side, with the same options.

use std::path::Path;

use anyhow::Result;

use super::columns::Columns;
use crate::pair::End;

/// One comparison.
#[derive(Debug)]
pub(super) struct Case {
    /// What `--only` names.
    pub(super) name: &'static str,
    pub(super) test: Test,
    /// Of both programs.
    pub(super) options: &'static str,
}

/// A program of C and its counterpart here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Test {
    /// rdma-core's `ibv_rc_pingpong` and the example `rc_pingpong`.
    Pingpong,
    /// perftest's `ib_VERB_KIND` and `rdma-perf VERB KIND --compat perftest`.
    Perftest { verb: &'static str, kind: &'static str },
    /// The same without `--compat perftest`: as `rdma-perf` does it when it is not to be like perftest.
    Native { verb: &'static str, kind: &'static str },
}

/// Who is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    C,
    Ours,
}

/// The cases. With one processor, a test with work at both ends has to wait for events, so that one end sleeps while
/// the other works; of a test with work at one end only, the other sleeps anyway.
pub(super) const CASES: &[Case] = &[
    // So many because C's takes about 4.6 ms more for a run of any length, 4 % of one of 1000.
    case("rc-pingpong", Test::Pingpong, "-e -n 10000"),
    case("send-lat", perftest("send", "lat"), "-e -s 2"),
    case("send-lat-4096", perftest("send", "lat"), "-e -s 4096"),
    case("read-lat", perftest("read", "lat"), "-e -s 2"),
    case("atomic-lat", perftest("atomic", "lat"), "-e"),
    case("write-bw", perftest("write", "bw"), "-s 64"),
    case("write-bw-signaled", perftest("write", "bw"), "-s 64 -Q 1"),
    case("write-bw-list", perftest("write", "bw"), "-s 64 -l 16 -n 4992"),
    case("write-bw-65536", perftest("write", "bw"), "-s 65536 -n 1000"),
    case("read-bw", perftest("read", "bw"), "-s 64 -n 5000"),
    // So many because how the two ends fall into step differs from launch to launch, by 1.6 % of 5000.
    case("send-bw", perftest("send", "bw"), "-e -s 64 -n 20000"),
    case("native-send-lat", native("send", "lat"), "-e -s 2"),
    case("native-read-lat", native("read", "lat"), "-e -s 2"),
    case("native-write-bw", native("write", "bw"), "-s 64"),
    case("native-write-bw-list", native("write", "bw"), "-s 64 -l 16 -n 4992"),
    case("native-send-bw", native("send", "bw"), "-e -s 64 -n 20000"),
];

const fn case(name: &'static str, test: Test, options: &'static str) -> Case {
    Case { name, test, options }
}

const fn perftest(verb: &'static str, kind: &'static str) -> Test {
    Test::Perftest { verb, kind }
}

const fn native(verb: &'static str, kind: &'static str) -> Test {
    Test::Native { verb, kind }
}

impl Case {
    /// The program of `side` as `end`, with its arguments. `release` is where cargo leaves ours.
    pub(super) fn command(&self, side: Side, end: End, release: &Path) -> Vec<String> {
        const HOST: &str = "localhost";
        let (device, gid) = match self.test {
            Test::Pingpong => ("-d rxe0", "-g 1"),
            Test::Perftest { .. } | Test::Native { .. } => ("-d rxe0", "-x 1"),
        };
        let ours = |name: &str| release.join(name).to_string_lossy().into_owned();
        let client = end == End::Client;
        let (program, before, after) = match (self.test, side) {
            (Test::Pingpong, Side::C) => ("ibv_rc_pingpong".to_owned(), String::new(), HOST),
            (Test::Pingpong, Side::Ours) => (ours("examples/rc_pingpong"), String::new(), HOST),
            (Test::Perftest { verb, kind } | Test::Native { verb, kind }, Side::C) => {
                (format!("ib_{verb}_{kind}"), String::new(), HOST)
            }
            (Test::Perftest { verb, kind }, Side::Ours) if client => {
                (ours("rdma-perf"), format!("{verb} {kind} {HOST} --compat perftest"), "")
            }
            (Test::Native { verb, kind }, Side::Ours) if client => {
                (ours("rdma-perf"), format!("{verb} {kind} {HOST} --percentiles 50"), "")
            }
            // It is told the options by its client.
            (Test::Perftest { .. } | Test::Native { .. }, Side::Ours) => {
                return vec![ours("rdma-perf"), "server".into(), "--once".into()];
            }
        };
        let arguments = format!("{before} {device} {gid} {} {}", self.options, if client { after } else { "" });
        std::iter::once(program).chain(arguments.split_whitespace().map(str::to_owned)).collect()
    }

    /// The program of C and the options, as readers know them.
    pub(super) fn title(&self) -> String {
        match self.test {
            Test::Pingpong => format!("ibv_rc_pingpong {}", self.options),
            Test::Perftest { verb, kind } => format!("ib_{verb}_{kind} {}", self.options),
            Test::Native { verb, kind } => format!("ib_{verb}_{kind} {} (ours native)", self.options),
        }
    }

    /// Whether the two programs are to print the same columns.
    pub(super) fn has_columns(&self) -> bool {
        matches!(self.test, Test::Perftest { .. })
    }

    /// Reads what the client has printed.
    pub(super) fn parse(&self, lines: &[String]) -> Result<Columns> {
        match self.test {
            Test::Pingpong => Columns::pingpong(lines),
            // The tables of both modes have the columns that are needed, under the same names.
            Test::Perftest { .. } | Test::Native { .. } => Columns::perftest(lines),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str, side: Side, end: End) -> String {
        let case = CASES.iter().find(|case| case.name == name).unwrap();
        case.command(side, end, Path::new("/t/release")).join(" ")
    }

    #[test]
    fn both_sides_get_the_same_options() {
        let client = |side| line("write-bw-signaled", side, End::Client);
        assert_eq!(client(Side::C), "ib_write_bw -d rxe0 -x 1 -s 64 -Q 1 localhost");
        let ours = "/t/release/rdma-perf write bw localhost --compat perftest -d rxe0 -x 1 -s 64 -Q 1";
        assert_eq!(client(Side::Ours), ours);
        assert_eq!(
            line("rc-pingpong", Side::Ours, End::Client),
            "/t/release/examples/rc_pingpong -d rxe0 -g 1 -e -n 10000 localhost"
        );
    }

    #[test]
    fn a_server_is_told_its_options_where_the_client_does_not_tell_it() {
        assert_eq!(line("read-lat", Side::C, End::Server), "ib_read_lat -d rxe0 -x 1 -e -s 2");
        assert_eq!(line("read-lat", Side::Ours, End::Server), "/t/release/rdma-perf server --once");
        assert_eq!(line("rc-pingpong", Side::C, End::Server), "ibv_rc_pingpong -d rxe0 -g 1 -e -n 10000");
    }

    #[test]
    fn no_two_cases_have_one_name() {
        for (index, case) in CASES.iter().enumerate() {
            assert!(CASES[..index].iter().all(|other| other.name != case.name), "{}", case.name);
        }
    }
}
