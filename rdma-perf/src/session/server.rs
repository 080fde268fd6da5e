//! The server: it runs what clients request.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::control::{Control, PROTOCOL, Reply, Request};
use super::device::OpenDevice;
use super::summary::bandwidth;
use super::threads::{Event, Threads};
use crate::clock::Clock;
use crate::cpu::Usage;
use crate::endpoint::cm::CmListener;
use crate::endpoint::worker::WorkerAddress;
use crate::host::memory;
use crate::plan::layout::Layout;
use crate::plan::{Plan, Role};
use crate::run::Shared;
use crate::units::amount;

/// Clients served at the same time.
const MAX_CLIENTS: usize = 256;
/// Memory limit of a test if the free memory is unknown.
const MAX_MEMORY: u64 = 4 << 30;
/// Longest time of a client between two steps of the set-up.
const SETUP_LIMIT: Duration = Duration::from_secs(120);

/// Serves clients, each in its own thread.
#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) opened: OpenDevice,
    pub(crate) clock: Clock,
    /// Memory limit of one test; three quarters of the free memory if `None`.
    pub(crate) max_memory: Option<u64>,
    /// Processors that tests may use, all if empty. Tests that request none get all of these.
    pub(crate) cpus: Vec<u32>,
    /// Whether the server runs in the client's process, which then prints all messages.
    pub(crate) is_loopback: bool,
}

impl Server {
    /// Serves clients concurrently, forever. With `once` it serves one and returns its failure.
    pub(crate) fn serve(&self, listener: &TcpListener, once: bool) -> Result<()> {
        let serving = Arc::new(AtomicUsize::new(0));
        let mut number = 0_u64;
        loop {
            // No timeout: the server waits for clients.
            let (stream, peer) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if once => return Err(error).context("cannot accept a client"),
                Err(error) => {
                    // Descriptors may be exhausted. Clients that are being served will free theirs.
                    eprintln!("cannot accept a client: {error}");
                    std::thread::sleep(Duration::from_millis(200));
                    continue;
                }
            };
            number += 1;
            let client = format!("#{number} {}", SocketAddr::new(peer.ip().to_canonical(), peer.port()));
            if once {
                return self.client(stream, &client).with_context(|| format!("client {client}"));
            }
            let (server, serving) = (self.clone(), Arc::clone(&serving));
            if serving.fetch_add(1, Ordering::Relaxed) >= MAX_CLIENTS {
                serving.fetch_sub(1, Ordering::Relaxed);
                eprintln!("{client}: rejected, {MAX_CLIENTS} clients are being served");
                continue;
            }
            let name = client.clone();
            let body = move || {
                if let Err(error) = server.client(stream, &name) {
                    eprintln!("{name}: {error:#}");
                }
                serving.fetch_sub(1, Ordering::Relaxed);
            };
            if let Err(error) = std::thread::Builder::new().name("client".into()).spawn(body) {
                eprintln!("{client}: rejected, cannot start a thread: {error}");
            }
        }
    }

    /// Serves one client. `client` is its name in messages.
    fn client(&self, stream: TcpStream, client: &str) -> Result<()> {
        let mut control = Control::new(stream)?;
        let result = self.session(&mut control, client);
        if let Err(error) = &result {
            // The send fails if the client is gone.
            let _ = control.send(&Reply::Failed { reason: format!("{error:#}") });
        }
        result
    }

    fn session(&self, control: &mut Control, client: &str) -> Result<()> {
        let (protocol, version, plan) = match control.receive(Some(SETUP_LIMIT))? {
            Request::Hello { protocol, version, plan, .. } => (protocol, version, plan),
            Request::Failed { reason } => bail!("the client failed: {reason}"),
            _ => bail!("the client sent an unexpected first message"),
        };
        if protocol != PROTOCOL {
            bail!(
                "the client is rdma-perf {version} with protocol {protocol}, this is {} with {PROTOCOL}: use the same version",
                env!("CARGO_PKG_VERSION")
            );
        }
        plan.check().map_err(anyhow::Error::msg)?;
        self.check_memory(Layout::total(&plan, Role::Server), client)?;
        self.log(format_args!("{client}: {}", plan.title()));
        let cpus = self.allowed_cpus(&plan.pinning.server)?;
        let mut threads = Threads::new(&self.opened, &plan, Role::Server, self.clock, cpus, &|| Ok(()))?;
        let mut host = self.opened.host.clone();
        (host.extended_post, host.extended_poll) = threads.interfaces();
        let listener = plan.rdma_cm.then(|| self.cm_listener(control, &plan)).transpose()?;
        let cm_address = listener.as_ref().map(CmListener::cm_address);
        control.send(&Reply::Accepted { host: Box::new(host), workers: threads.addresses(), cm_address })?;
        let workers = match control.receive(Some(SETUP_LIMIT))? {
            Request::Connect { workers } => workers,
            Request::Failed { reason } => bail!("the client failed: {reason}"),
            _ => bail!("the client sent an unexpected message"),
        };
        threads.connect(&workers, &plan, Role::Server, &|| Ok(()))?;
        if let Some(listener) = listener {
            self.accept_by_address(&mut threads, &listener, &workers, &plan, control)?;
        }
        control.send(&Reply::Connected)?;
        loop {
            match control.receive(Some(SETUP_LIMIT))? {
                Request::Prepare { size } if size < plan.sizes.len() => {
                    self.size(&mut threads, control, &plan, size)?
                }
                Request::Bye => {
                    self.log(format_args!("{client}: done"));
                    return Ok(());
                }
                Request::Failed { reason } => bail!("the client failed: {reason}"),
                _ => bail!("the client sent an unexpected message"),
            }
        }
    }

    /// Listens for connections by librdmacm: at the IP address of the GID, or else at the address of the control
    /// connection.
    fn cm_listener(&self, control: &Control, plan: &Plan) -> Result<CmListener> {
        let ip = self.opened.ip.map_or_else(|| control.own_address(), Ok)?;
        CmListener::new(ip, plan.queue_pairs())
    }

    /// Waits until the client has connected by librdmacm, or has failed.
    fn accept_by_address(
        &self,
        threads: &mut Threads,
        listener: &CmListener,
        workers: &[WorkerAddress],
        plan: &Plan,
        control: &mut Control,
    ) -> Result<()> {
        let check = || match control.has_message()? {
            true => bail!("the client sent a message instead of connecting"),
            false => Ok(()),
        };
        let received = threads.accept_by_address(listener, workers, self.opened.device_port(), plan, &check);
        match received {
            Err(error) if control.has_message()? => match control.receive(Some(SETUP_LIMIT))? {
                Request::Failed { reason } => bail!("the client failed: {reason}"),
                _ => Err(error),
            },
            received => received,
        }
    }

    /// Refuses a test that needs more `memory` than it may use.
    fn check_memory(&self, memory: u64, client: &str) -> Result<()> {
        if self.is_loopback {
            // The client has checked the memory of both ends.
            return Ok(());
        }
        let available = memory::available();
        let most = self.max_memory.or(available.map(|bytes| bytes / 4 * 3)).unwrap_or(MAX_MEMORY);
        if memory > most {
            let whose = if self.max_memory.is_some() { "is allowed" } else { "may be used of the free memory" };
            bail!(
                "the test takes {} of memory, more than {} that {whose}: see server --max-memory",
                amount(memory),
                amount(most)
            );
        }
        if let Some(free) = available.filter(|free| memory > *free) {
            self.log(format_args!(
                "{client}: warning: the test takes {} of memory, but {} are free",
                amount(memory),
                amount(free)
            ));
        }
        Ok(())
    }

    /// The processors for a test that requests `wanted`, which may be empty.
    fn allowed_cpus<'c>(&'c self, wanted: &'c [u32]) -> Result<&'c [u32]> {
        if wanted.is_empty() {
            return Ok(&self.cpus);
        }
        if let Some(other) = wanted.iter().find(|cpu| !self.cpus.is_empty() && !self.cpus.contains(cpu)) {
            bail!("processor {other} is not among those of this server: see server --cpu");
        }
        Ok(wanted)
    }

    fn size(&self, threads: &mut Threads, control: &mut Control, plan: &Plan, index: usize) -> Result<()> {
        threads.prepare(plan, index)?;
        control.send(&Reply::Prepared)?;
        let usage = Usage::now();
        // perftest measures no processor time, so `--compat` does not either.
        let used = || (!plan.compat && !self.is_loopback).then(|| usage.until(Usage::now()));
        let is_passive = !(plan.is_two_sided() || plan.bidirectional);
        if is_passive {
            // This end has no work. The client decides how long the run takes: see `Control::receive`.
            let theirs = receive_finished(control, None)?;
            let cpu = used();
            let validated = threads.check(plan, index, &[], &theirs)?;
            return control.send(&Reply::Done { sent: Vec::new(), reverse: None, validated, cpu });
        }
        let shared = Shared::default();
        let (mut ours, mut theirs) = (Vec::new(), None);
        let outcomes = threads.run(plan, index, &shared, |supervisor| {
            let mut ended = false;
            while !(ended && theirs.is_some()) {
                match supervisor.next(control, None::<&OwnedFd>, false)? {
                    Event::Sent(sent) => ours = sent,
                    Event::Control => {
                        let sent = receive_finished(control, Some(SETUP_LIMIT))?;
                        supervisor.set_expected(&sent);
                        theirs = Some(sent);
                    }
                    Event::Failed(error) => return Err(error),
                    Event::Ended => ended = true,
                    Event::Interrupted | Event::Tick => {}
                }
            }
            Ok(())
        })?;
        let cpu = used();
        let validated = outcomes.iter().map(|outcome| outcome.validated).sum::<u64>()
            + threads.check(plan, index, &ours, &theirs.unwrap_or_default())?;
        let reverse = plan.bidirectional.then(|| bandwidth(plan.sizes[index], &outcomes, self.clock));
        control.send(&Reply::Done { sent: ours, reverse, validated, cpu })
    }

    fn log(&self, what: std::fmt::Arguments<'_>) {
        if !self.is_loopback {
            eprintln!("{what}");
        }
    }
}

/// Waits for the client's `Finished`, and returns what it has sent.
fn receive_finished(control: &mut Control, limit: Option<Duration>) -> Result<Vec<Vec<u64>>> {
    match control.receive(limit)? {
        Request::Finished { sent } => Ok(sent),
        Request::Failed { reason } => bail!("the client failed: {reason}"),
        _ => bail!("the client sent an unexpected message"),
    }
}
