//! `rdma-perf`: bandwidth, message rate and latency of RDMA verbs, and a check of a host's set-up.
//!
//! A test passes through these layers from top to bottom. A module uses only its own folder and lower layers, and no
//! modules use each other in a cycle. `testing::modules` checks this.
//!
//! | layer | what it does |
//! |---|---|
//! | `cli` | parses the command line and makes a plan of it |
//! | `session` | runs the plan at both ends, which agree over a TCP connection |
//! | `run` | posts and polls in one thread: the measured loops |
//! | `endpoint` | owns the queue pairs, completion queues and memory of one thread |
//! | `report` | shows, writes and draws the results |
//! | `plan` | says what to measure; both ends have the same |
//! | `clock`, `cpu`, `host`, `interrupt`, `stats`, `transport`, `units` | leaves that any layer may use |
//!
//! `doctor` is a separate command, which uses only `host` and `units`.

mod cli;
mod clock;
mod cpu;
mod doctor;
mod endpoint;
mod host;
mod interrupt;
mod plan;
mod report;
mod run;
mod session;
mod stats;
#[cfg(test)]
mod testing;
mod transport;
mod units;

use std::net::{Ipv6Addr, TcpListener};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};

use cli::{Cli, Command, ServerArgs, TestArgs};
use clock::Clock;
use host::memory;
use interrupt::{INTERRUPTED, Interrupt, Interrupted};
use plan::layout::memory_warning;
use plan::{Metric, Verb};
use report::display::Display;
use report::output::Output;
use report::{Report, plot};
use session::client::Client;
use session::connect::connect;
use session::device::OpenDevice;
use session::server::Server;

/// Exit status of a failure.
const FAILURE: i32 = 1;
/// Exit status of a wrong command line, the same as clap's.
const USAGE: i32 = 2;
/// Exit status of results that exceed a limit.
const LIMIT_BROKEN: i32 = 3;

fn main() -> ExitCode {
    let command = Cli::parse_process().command;
    let status = match &command {
        Command::Server(args) => serve(args),
        Command::Plot(args) => plot::main(&args.results, &args.output, args.title.as_deref()),
        Command::Doctor(args) => doctor::main(args.device.as_deref(), args.json),
        test => test.as_test().map_or(Ok(0), |(verb, metric, args)| measure(args, verb, metric)),
    };
    let status = status.unwrap_or_else(|error| {
        eprintln!("rdma-perf: {error:#}");
        FAILURE
    });
    ExitCode::from(u8::try_from(status).unwrap_or(1))
}

/// Runs one test: plan, session, run, report. Returns the exit status.
fn measure(args: &TestArgs, verb: Verb, metric: Metric) -> Result<i32> {
    let plan = match args.plan(verb, metric) {
        Ok(plan) => plan,
        Err(reason) => {
            eprintln!("error: {reason}\n\nFor more information, try '--help'.");
            return Ok(USAGE);
        }
    };
    let interrupt = Arc::new(Interrupt::install()?);
    let out = &args.out;
    let output = Output::new(out.output.as_deref(), out.plot.as_deref())?;
    cpu::check(&plan.pinning.client).context("--cpu")?;
    if let Some(warning) = memory_warning(&plan, args.loopback, memory::available()).filter(|_| !out.quiet) {
        eprintln!("rdma-perf: warning: {warning}");
    }

    let opened = OpenDevice::open(args.device.device.as_deref(), args.device.ib_port, args.device.gid_index)?;
    let clock = Clock::calibrate();
    let server = args.host.as_deref().map(|host| (host, args.device.port));
    let client = Client {
        opened: &opened,
        clock,
        label: out.label.clone().unwrap_or_else(|| plan.title()),
        percents: out.recorded_percentiles(),
        default_sizes: args.load.has_default_sizes(),
        interrupt: &interrupt,
    };
    let failed = || format!("the test against {} failed", server.map_or("this process", |(host, _)| host));
    let mut display = Display::new(&plan, out.format, &out.percentiles, out.report_gbits, out.quiet);
    let control = connect(server, plan.compat, &opened, clock, &interrupt);
    let ended = control.and_then(|control| client.run(control, &plan, &mut display).with_context(failed));
    let (report, ending) = match ended {
        Ok(ended) => ended,
        Err(error) if error.is::<Interrupted>() => {
            eprintln!("rdma-perf: interrupted before anything was measured");
            return Ok(INTERRUPTED);
        }
        Err(error) => return Err(error),
    };

    display.finish(&report);
    output.write(&report)?;
    match ending {
        Ok(()) if out.limits().check(&report) => Ok(0),
        Ok(()) => Ok(LIMIT_BROKEN),
        Err(error) if error.is::<Interrupted>() => {
            eprintln!("rdma-perf: {}", interruption(&report));
            Ok(INTERRUPTED)
        }
        Err(error) => Err(error).with_context(failed),
    }
}

fn interruption(report: &Report) -> String {
    match report.rows.last() {
        Some(row) if row.interrupted => {
            format!("interrupted; the row of {} bytes covers the messages measured so far", row.size)
        }
        Some(_) => "interrupted; the rows above are complete".into(),
        None => "interrupted before anything was measured; no results were written".into(),
    }
}

fn serve(args: &ServerArgs) -> Result<i32> {
    let cpus = args.cpu.as_ref().map_or_else(Vec::new, |cpus| cpus.0.clone());
    cpu::check(&cpus).context("--cpu")?;
    let opened = OpenDevice::open(args.device.device.as_deref(), args.device.ib_port, args.device.gid_index)?;
    let listener = listen(args.device.port)?;
    let (device, gid) = (&opened.host.device, &opened.host.gid);
    eprintln!("serving on TCP port {} with {device}, GID {gid}; press Ctrl-C to stop", listener.local_addr()?.port());
    let server = Server { opened, clock: Clock::calibrate(), max_memory: args.max_memory, cpus, is_loopback: false };
    server.serve(&listener, args.once)?;
    Ok(0)
}

/// Listens on all addresses, or on all IPv4 addresses if the host has no IPv6.
fn listen(port: u16) -> Result<TcpListener> {
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|_| TcpListener::bind(("0.0.0.0", port))).with_context(
        || format!("cannot listen on TCP port {port}; is another server running? choose another port with --port"),
    )
}
