//! Foreign programs on soft0: UCX's performance test, and Open MPI over UCX.

mod packages;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use self::packages::Root;
use super::report::{Failure, Report};
use super::{Args, Outcome};
use crate::{pair, process};

/// Transports of UCX: unreliable datagrams alone, and reliable connections that are set up over them.
const TRANSPORTS: [&str; 2] = ["ud_verbs,self", "rc_verbs,ud_verbs,self"];
const ITERATIONS: u64 = 100;
const SIZES: [u64; 2] = [8, 1 << 20];

/// Tests of `ucx_perftest` in which both sides take part, so that a side may sleep until something arrives.
const TWO_SIDED: [&str; 4] = ["tag_lat", "tag_bw", "ucp_am_lat", "stream_bw"];
/// One-sided tests, which raise no events at the target. The target spins on its memory, because no event would wake it.
const ONE_SIDED: [&str; 3] = ["ucp_put_lat", "ucp_put_bw", "ucp_get"];
/// Atomics that UCX emulates by messages, since `rc_verbs` lacks some operations that its protocols need.
const ATOMIC: [&str; 3] = ["ucp_add", "ucp_fadd", "ucp_cswap"];
/// Atomic operations of the device itself, below the protocols of UCX.
const DEVICE_ATOMIC: [&str; 3] = ["add_mr", "fadd", "cswap"];

/// Passes messages around a ring and sums over all ranks, and verifies the data.
const RING: &str = include_str!("ring.c");
const RANKS: &str = "4";

/// Runs all exchanges `--repeat` times.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    let root = match Root::get() {
        Ok(root) => root,
        Err(error) => return Ok(Outcome::Skipped(format!("{error:#}"))),
    };
    fs::create_dir_all(root.file(""))?;
    let mut report = Report::default();
    let mut count = |name: String, result: Result<()>| match result {
        Ok(()) => report.tally.passed += 1,
        Err(error) => {
            println!("    {name} failed");
            report.fail(Failure::new(name, &format!("{error:#}")));
        }
    };
    count("ucx_info".to_owned(), lists_transports(&root));
    let ring = compile_ring(&root);
    for _ in 0..args.repeat {
        for test in DEVICE_ATOMIC {
            let exchange = Exchange { test, size: 8, sleeps: false };
            count(format!("rc_verbs of the device {exchange:?}"), exchange.run_on(&root, Layer::Device));
        }
        for transports in TRANSPORTS {
            for exchange in Exchange::all() {
                count(format!("{transports} {exchange:?}"), exchange.run_on(&root, Layer::Protocols(transports)));
            }
            let ring = ring.as_deref().map_err(|error| anyhow::anyhow!("{error:#}"));
            count(format!("{transports} Open MPI"), ring.and_then(|ring| run_ring(&root, ring, transports)));
        }
    }
    Ok(Outcome::Tests(report))
}

fn lists_transports(root: &Root) -> Result<()> {
    let text = process::output(root.command("ucx_info")?.arg("-d"))?;
    for wanted in ["Transport: rc_verbs", "Transport: ud_verbs", "Device: soft0:1"] {
        ensure!(text.contains(wanted), "`ucx_info -d` does not say {wanted:?}:\n{text}");
    }
    Ok(())
}

/// The layer of UCX that a run tests.
#[derive(Clone, Copy)]
enum Layer<'a> {
    /// UCP, over these transports.
    Protocols(&'a str),
    /// UCT: the operations of `rc_verbs` themselves.
    Device,
}

/// A run of `ucx_perftest`.
#[derive(Clone, Copy, Debug)]
struct Exchange {
    test: &'static str,
    size: u64,
    sleeps: bool,
}

impl Exchange {
    fn all() -> Vec<Exchange> {
        let mut all = Vec::new();
        for size in SIZES {
            all.extend(TWO_SIDED.map(|test| Exchange { test, size, sleeps: false }));
            all.extend(TWO_SIDED.map(|test| Exchange { test, size, sleeps: true }));
            all.extend(ONE_SIDED.map(|test| Exchange { test, size, sleeps: false }));
        }
        all.extend(ATOMIC.map(|test| Exchange { test, size: 8, sleeps: false }));
        all
    }

    fn run_on(self, root: &Root, layer: Layer<'_>) -> Result<()> {
        let (traffic, port) = (Traffic::new(root)?, pair::free_port()?);
        let end = || -> Result<Command> {
            let mut command = root.command("ucx_perftest")?;
            match layer {
                Layer::Protocols(transports) => over(&mut command, transports),
                Layer::Device => _ = command.args(["-d", "soft0:1", "-x", "rc_verbs"]),
            }
            traffic.of(&mut command);
            command.args(["-t", self.test, "-s", &self.size.to_string(), "-n", &ITERATIONS.to_string()]);
            command.args(["-w", "10", "-p", &port.to_string()]);
            if self.sleeps {
                command.args(["-E", "sleep"]);
            }
            Ok(command)
        };
        let (server, mut client) = (end()?, end()?);
        client.arg("127.0.0.1");
        pair::client_output_on(port, server, client)?;
        traffic.check(2, self.size * ITERATIONS)
    }
}

/// Restricts UCX to these transports of soft0.
fn over(command: &mut Command, transports: &str) {
    command.env("UCX_TLS", transports).env("UCX_NET_DEVICES", "soft0:1");
}

/// The file of soft0's traffic counters: `RDMA_SOFT_STATS`.
struct Traffic(PathBuf);

impl Traffic {
    fn new(root: &Root) -> Result<Traffic> {
        let file = root.file("traffic");
        fs::write(&file, "")?;
        Ok(Traffic(file))
    }

    fn of(&self, command: &mut Command) {
        command.env("RDMA_SOFT_STATS", &self.0);
    }

    /// Checks that `processes` have reported counters, and that one of them has sent at least `bytes`.
    fn check(&self, processes: usize, bytes: u64) -> Result<()> {
        let text = fs::read_to_string(&self.0)?;
        let sent: Vec<u64> = text.lines().filter_map(sent_bytes).collect();
        ensure!(sent.len() == processes, "counters of {processes} processes:\n{text}");
        ensure!(sent.iter().any(|sent| *sent >= bytes), "no process has sent {bytes} bytes over soft0:\n{text}");
        Ok(())
    }
}

fn sent_bytes(line: &str) -> Option<u64> {
    line.split(' ').find_map(|field| field.strip_prefix("sent_bytes="))?.parse().ok()
}

fn compile_ring(root: &Root) -> Result<PathBuf> {
    let (source, program) = (root.file("ring.c"), root.file("ring"));
    fs::write(&source, RING)?;
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-Wall", "-Werror", "-I"]).arg(root.mpi_headers()).arg("-o").arg(&program).arg(source);
    // The library's own dependencies are found when the program runs.
    cc.arg(root.mpi_library()).arg("-Wl,--allow-shlib-undefined");
    process::output(&mut cc).context("cannot compile ring.c against Open MPI")?;
    Ok(program)
}

fn run_ring(root: &Root, ring: &Path, transports: &str) -> Result<()> {
    let traffic = Traffic::new(root)?;
    let mut command = root.command("orterun")?;
    over(&mut command, transports);
    traffic.of(&mut command);
    // `isolated` starts no processes on other hosts, so ssh is not needed.
    command.args([
        "--oversubscribe",
        "--timeout",
        "60",
        "-np",
        RANKS,
        "--mca",
        "pml",
        "ucx",
        "--mca",
        "plm",
        "isolated",
    ]);
    if process::is_root() {
        command.arg("--allow-run-as-root");
    }
    let text = process::output(command.arg(ring))?;
    if !text.lines().any(|line| line == format!("{RANKS} ranks agree")) {
        bail!("the ranks do not agree:\n{text}");
    }
    // Each rank forwards 1 MiB three times.
    traffic.check(4, 3 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_from_a_line() {
        assert_eq!(sent_bytes("pid=7 sent_packets=1 sent_bytes=28 received_packets=0 received_bytes=0"), Some(28));
        assert_eq!(sent_bytes("pid=7"), None);
    }
}
