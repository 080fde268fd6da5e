//! `rdma-perf`: bandwidth, message rate and latency of RDMA verbs, and a check of a host's set-up.

mod cli;
mod clock;
mod control;
mod cpu;
mod credit;
mod datagram;
mod doctor;
mod interrupt;
mod plan;
mod rdmacm;
mod report;
mod run;
#[cfg(test)]
mod scratch;
mod session;
mod stats;
mod test;
mod transport;
mod units;
mod worker;

use std::net::{Ipv6Addr, TcpListener};
use std::process::ExitCode;

use anyhow::{Context, Result};

use cli::{Cli, Command, ServerArgs};
use clock::Clock;
use session::Opened;
use session::server::Server;

/// The exit status of a failure; clap has 2 for a wrong command line.
const FAILURE: i32 = 1;

fn main() -> ExitCode {
    let command = Cli::of_process().command;
    let status = match &command {
        Command::Server(args) => server(args),
        Command::Plot(args) => report::plot::main(args),
        Command::Doctor(args) => doctor::main(args),
        test => test.test().map_or(Ok(0), |(verb, metric, args)| test::main(args, verb, metric)),
    };
    let status = status.unwrap_or_else(|error| {
        eprintln!("rdma-perf: {error:#}");
        FAILURE
    });
    ExitCode::from(u8::try_from(status).unwrap_or(1))
}

fn server(args: &ServerArgs) -> Result<i32> {
    let cpus = args.cpu.as_ref().map_or_else(Vec::new, |cpus| cpus.0.clone());
    cpu::check(&cpus).context("--cpu")?;
    let opened = Opened::open(&args.device)?;
    let listener = listen(args.device.port)?;
    let (device, gid) = (&opened.host.device, &opened.host.gid);
    eprintln!("serving on TCP port {} with {device}, GID {gid}; Ctrl-C ends it", listener.local_addr()?.port());
    let server = Server { opened, clock: Clock::calibrate(), max_memory: args.max_memory, cpus, is_inner: false };
    server.serve(&listener, args.once)?;
    Ok(0)
}

/// Listens on all addresses, of IPv4 where there is no IPv6.
fn listen(port: u16) -> Result<TcpListener> {
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|_| TcpListener::bind(("0.0.0.0", port))).with_context(
        || format!("cannot listen on TCP port {port}; is another server running? --port takes another one"),
    )
}
