//! The cases: a C program and its counterpart here, run with the same options.

use std::path::Path;

use anyhow::Result;

use super::columns::Columns;
use crate::pair::End;

/// One comparison.
#[derive(Debug)]
pub(super) struct Case {
    /// Name for `--only`.
    pub(super) name: &'static str,
    pub(super) test: Test,
    /// Options of both programs.
    pub(super) options: &'static str,
}

/// A C program and its counterpart in this workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Test {
    /// rdma-core's `ibv_rc_pingpong` and the example `rc_pingpong`.
    Pingpong,
    /// perftest's `ib_VERB_KIND` and `rdma-perf VERB KIND --compat perftest`.
    Perftest { verb: &'static str, kind: &'static str },
    /// perftest's `ib_VERB_KIND` and `rdma-perf VERB KIND` in its own mode, without `--compat`.
    Native { verb: &'static str, kind: &'static str },
}

/// The C programs or the programs of this workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    C,
    Ours,
}

/// All cases.
///
/// The guest has one processor. A test with work at both ends therefore waits for events (`-e`), so that one end sleeps
/// while the other works. In a test with work at one end only, the other end sleeps anyway.
pub(super) const CASES: &[Case] = &[
    // 10000 iterations, because the C program has a fixed cost of about 4.6 ms, which is 4 % of a run of 1000.
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
    // 20000 iterations, because the interleaving of the two ends varies between launches, by 1.6 % of a run of 5000.
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
    /// Command line of `side`'s program as `end`. `release` is cargo's output directory of our programs.
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
            // The client sends the options to the server.
            (Test::Perftest { .. } | Test::Native { .. }, Side::Ours) => {
                return vec![ours("rdma-perf"), "server".into(), "--once".into()];
            }
        };
        let arguments = format!("{before} {device} {gid} {} {}", self.options, if client { after } else { "" });
        std::iter::once(program).chain(arguments.split_whitespace().map(str::to_owned)).collect()
    }

    /// Title for the report: the C program with its options.
    pub(super) fn title(&self) -> String {
        match self.test {
            Test::Pingpong => format!("ibv_rc_pingpong {}", self.options),
            Test::Perftest { verb, kind } => format!("ib_{verb}_{kind} {}", self.options),
            Test::Native { verb, kind } => format!("ib_{verb}_{kind} {} (ours native)", self.options),
        }
    }

    /// Whether both programs have to print the same columns.
    pub(super) fn has_columns(&self) -> bool {
        matches!(self.test, Test::Perftest { .. })
    }

    /// Parses the output of the client.
    pub(super) fn parse(&self, lines: &[String]) -> Result<Columns> {
        match self.test {
            Test::Pingpong => Columns::pingpong(lines),
            // Both modes print the required columns under the same names.
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
    fn a_server_gets_the_options_unless_its_client_sends_them() {
        assert_eq!(line("read-lat", Side::C, End::Server), "ib_read_lat -d rxe0 -x 1 -e -s 2");
        assert_eq!(line("read-lat", Side::Ours, End::Server), "/t/release/rdma-perf server --once");
        assert_eq!(line("rc-pingpong", Side::C, End::Server), "ibv_rc_pingpong -d rxe0 -g 1 -e -n 10000");
    }

    #[test]
    fn case_names_are_unique() {
        for (index, case) in CASES.iter().enumerate() {
            assert!(CASES[..index].iter().all(|other| other.name != case.name), "{}", case.name);
        }
    }
}
