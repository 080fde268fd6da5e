//! UCX: its performance test, Open MPI over it, and a service that is found by address.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::Tests;
use super::packages::Root;
use super::watch::Watch;
use crate::pair::{self, Ends, Ready};
use crate::process;

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

/// Bytes of the smallest and largest blocks that the service reads and writes, and the number of blocks.
const BLOCKS: (&str, u64) = ("4096:200000", 200);

/// Lets `free` unmap nothing. UCX before 1.19 frees the memory of receives of `ud_verbs` before it destroys their queue pair, and
/// soft0 does not pin memory.
const KEEPS_MEMORY: [(&str, &str); 2] = [("MALLOC_MMAP_MAX_", "0"), ("MALLOC_TRIM_THRESHOLD_", "8589934592")];

/// Runs the tests that do not repeat.
pub(super) fn prepare(tests: &mut Tests) -> Result<PathBuf> {
    tests.count("ucx_info", lists_transports);
    compile_ring(&tests.root)
}

pub(super) fn run(tests: &mut Tests, ring: &Result<PathBuf>) {
    for test in DEVICE_ATOMIC {
        let exchange = Exchange { test, size: 8, sleeps: false };
        tests.count(&format!("rc_verbs of the device {exchange:?}"), |root| exchange.run_on(root, Layer::Device));
    }
    for transports in TRANSPORTS {
        for exchange in Exchange::all() {
            tests.count(&format!("{transports} {exchange:?}"), |root| {
                exchange.run_on(root, Layer::Protocols(transports))
            });
        }
        let ring = ring.as_deref().map_err(|error| anyhow::anyhow!("{error:#}"));
        tests.count(&format!("{transports} Open MPI"), |root| run_ring(root, ring?, transports));
        tests.count(&format!("{transports} io_demo over rdmacm"), |root| serve_blocks(root, transports));
    }
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
        let (watch, port) = (Watch::new(root)?, pair::free_port()?);
        let end = || -> Result<Command> {
            let mut command = root.command("ucx_perftest")?;
            match layer {
                Layer::Protocols(transports) => over(&mut command, transports),
                Layer::Device => _ = command.args(["-d", "soft0:1", "-x", "rc_verbs"]),
            }
            watch.of(&mut command);
            command.args(["-t", self.test, "-s", &self.size.to_string(), "-n", &ITERATIONS.to_string()]);
            command.args(["-w", "10", "-p", &port.to_string()]);
            if self.sleeps {
                command.args(["-E", "sleep"]);
            }
            Ok(command)
        };
        let (server, mut client) = (end()?, end()?);
        client.arg("127.0.0.1");
        pair::output(Ready::Tcp(port), Ends::Itself, server, client)?;
        watch.check(&format!("ucx_perftest {}", self.test), 2, self.size * ITERATIONS)
    }
}

/// Restricts UCX to these transports of soft0.
fn over(command: &mut Command, transports: &str) {
    command.env("UCX_TLS", transports).env("UCX_NET_DEVICES", "soft0:1").envs(KEEPS_MEMORY);
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
    let watch = Watch::new(root)?;
    let mut command = root.command("orterun")?;
    over(&mut command, transports);
    watch.of(&mut command);
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
    watch.check("orterun", 4, 3 << 20)
}

/// Reads and writes blocks of a service to which UCX connects by address, and verifies them.
fn serve_blocks(root: &Root, transports: &str) -> Result<()> {
    let (watch, port) = (Watch::new(root)?, pair::free_port()?);
    let (sizes, count) = BLOCKS;
    let end = || -> Result<Command> {
        let mut command = root.command("io_demo")?;
        over(&mut command, transports);
        watch.of(&mut command);
        command.env("UCX_SOCKADDR_TLS_PRIORITY", "rdmacm").args(["-q", "-d", sizes, "-p", &port.to_string()]);
        Ok(command)
    };
    let (server, mut client) = (end()?, end()?);
    client.args(["-o", "read,write", "-i", &count.to_string(), "127.0.0.1"]);
    let [_, said] = pair::output(Ready::Soft(&format!("/{port}/")), Ends::Killed, server, client)?;
    ensure!(said.iter().any(|line| line.contains("exit with status 'OK'")), "{}", said.join("\n"));
    watch.check("io_demo", 1, count * 4096 / 2)
}
