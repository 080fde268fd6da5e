//! The end that does what it is told.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::Opened;
use super::client::bandwidth;
use super::crew::{Crew, Happening};
use crate::clock::Clock;
use crate::control::{Control, PROTOCOL, Reply, Request, WorkerAddress};
use crate::cpu::Usage;
use crate::doctor::{amount, available_memory};
use crate::plan::{Plan, Role};
use crate::rdmacm::Reception;
use crate::run::Shared;
use crate::worker::Layout;

/// Clients that are served at a time.
const MAX_CLIENTS: usize = 256;
/// Memory of a test where it cannot be found out how much is free.
const MAX_MEMORY: u64 = 4 << 30;
/// How long a client may take from one step of the set-up to the next.
const SETUP_LIMIT: Duration = Duration::from_secs(120);

/// Serves clients, each in a thread of its own.
#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) opened: Opened,
    pub(crate) clock: Clock,
    /// Of one test; without it, three quarters of what is free.
    pub(crate) max_memory: Option<u64>,
    /// Processors of tests, unless they may have any; all of them for those that ask for none.
    pub(crate) cpus: Vec<u32>,
    /// Within the process of its client, which says what there is to say.
    pub(crate) is_inner: bool,
}

impl Server {
    /// Serves one client after the other and side by side, for ever; or one, with `once`, whose failure is the error.
    pub(crate) fn serve(&self, listener: &TcpListener, once: bool) -> Result<()> {
        let serving = Arc::new(AtomicUsize::new(0));
        let mut number = 0_u64;
        loop {
            // Without a deadline: to wait for clients is what a server is for.
            let (stream, peer) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if once => return Err(error).context("cannot accept a client"),
                Err(error) => {
                    // Out of descriptors, perhaps: those who are being served go on, and give theirs back.
                    eprintln!("cannot accept a client: {error}");
                    std::thread::sleep(Duration::from_millis(200));
                    continue;
                }
            };
            number += 1;
            let who = format!("#{number} {}", SocketAddr::new(peer.ip().to_canonical(), peer.port()));
            if once {
                return self.client(stream, &who).with_context(|| format!("client {who}"));
            }
            let (server, serving) = (self.clone(), Arc::clone(&serving));
            if serving.fetch_add(1, Ordering::Relaxed) >= MAX_CLIENTS {
                serving.fetch_sub(1, Ordering::Relaxed);
                eprintln!("{who}: turned away, {MAX_CLIENTS} clients are being served");
                continue;
            }
            let name = who.clone();
            let body = move || {
                if let Err(error) = server.client(stream, &name) {
                    eprintln!("{name}: {error:#}");
                }
                serving.fetch_sub(1, Ordering::Relaxed);
            };
            if let Err(error) = std::thread::Builder::new().name("client".into()).spawn(body) {
                eprintln!("{who}: turned away, no thread can be started: {error}");
            }
        }
    }

    /// One client, which is called `who` in what is said of it.
    fn client(&self, stream: TcpStream, who: &str) -> Result<()> {
        let mut control = Control::new(stream)?;
        let result = self.session(&mut control, who);
        if let Err(error) = &result {
            // The client may be gone already.
            let _ = control.send(&Reply::Failed { reason: format!("{error:#}") });
        }
        result
    }

    fn session(&self, control: &mut Control, who: &str) -> Result<()> {
        let (protocol, version, plan) = match control.receive(Some(SETUP_LIMIT))? {
            Request::Hello { protocol, version, plan, .. } => (protocol, version, plan),
            Request::Failed { reason } => bail!("the client gave up: {reason}"),
            _ => bail!("the client does not begin as it should"),
        };
        if protocol != PROTOCOL {
            bail!(
                "the client is rdma-perf {version} with protocol {protocol}, this is {} with {PROTOCOL}: use the same",
                env!("CARGO_PKG_VERSION")
            );
        }
        plan.check().map_err(anyhow::Error::msg)?;
        self.admit(Layout::total(&plan, Role::Server), who)?;
        self.say(format_args!("{who}: {}", plan.title()));
        let cpus = self.cpus_of(&plan.pinning.server)?;
        let mut crew = Crew::new(&self.opened, &plan, Role::Server, self.clock, cpus, &|| Ok(()))?;
        let mut host = self.opened.host.clone();
        (host.extended_post, host.extended_poll) = crew.interfaces();
        let reception = plan.rdma_cm.then(|| self.reception(control, &plan)).transpose()?;
        let meeting = reception.as_ref().map(Reception::meeting);
        control.send(&Reply::Accepted { host: Box::new(host), workers: crew.addresses(), meeting })?;
        let workers = match control.receive(Some(SETUP_LIMIT))? {
            Request::Connect { workers } => workers,
            Request::Failed { reason } => bail!("the client gave up: {reason}"),
            _ => bail!("the client does not go on as it should"),
        };
        crew.connect(&workers, &plan, Role::Server, &|| Ok(()))?;
        if let Some(reception) = reception {
            self.receive(&mut crew, &reception, &workers, &plan, control)?;
        }
        control.send(&Reply::Connected)?;
        loop {
            match control.receive(Some(SETUP_LIMIT))? {
                Request::Prepare { size } if size < plan.sizes.len() => self.size(&mut crew, control, &plan, size)?,
                Request::Bye => {
                    self.say(format_args!("{who}: done"));
                    return Ok(());
                }
                Request::Failed { reason } => bail!("the client gave up: {reason}"),
                _ => bail!("the client does not go on as it should"),
            }
        }
    }

    /// Where the client is to connect to by address: at that of the GID where it is one of IP, otherwise where the client has come.
    fn reception(&self, control: &Control, plan: &Plan) -> Result<Reception> {
        let ip = self.opened.ip.map_or_else(|| control.own_address(), Ok)?;
        Reception::new(ip, plan.queue_pairs())
    }

    /// Waits until the client has connected by address, or gives up.
    fn receive(
        &self,
        crew: &mut Crew,
        reception: &Reception,
        workers: &[WorkerAddress],
        plan: &Plan,
        control: &mut Control,
    ) -> Result<()> {
        let check = || match control.has_news()? {
            true => bail!("the client does not connect"),
            false => Ok(()),
        };
        let received = crew.receive(reception, workers, self.opened.place(), plan, &check);
        match received {
            Err(error) if control.has_news()? => match control.receive(Some(SETUP_LIMIT))? {
                Request::Failed { reason } => bail!("the client gave up: {reason}"),
                _ => Err(error),
            },
            received => received,
        }
    }

    /// Refuses a test that takes more `memory` than it may.
    fn admit(&self, memory: u64, who: &str) -> Result<()> {
        if self.is_inner {
            // The client has looked at both.
            return Ok(());
        }
        let available = available_memory();
        let most = self.max_memory.or(available.map(|bytes| bytes / 4 * 3)).unwrap_or(MAX_MEMORY);
        if memory > most {
            let whose = if self.max_memory.is_some() { "is allowed" } else { "may be used of what is free" };
            bail!(
                "the test takes {} of memory, more than {} that {whose}: see server --max-memory",
                amount(memory),
                amount(most)
            );
        }
        if let Some(free) = available.filter(|free| memory > *free) {
            self.say(format_args!(
                "{who}: warning: the test takes {} of memory, and {} are free",
                amount(memory),
                amount(free)
            ));
        }
        Ok(())
    }

    /// The processors of a test that asks for these, or for none.
    fn cpus_of<'c>(&'c self, wanted: &'c [u32]) -> Result<&'c [u32]> {
        if wanted.is_empty() {
            return Ok(&self.cpus);
        }
        if let Some(other) = wanted.iter().find(|cpu| !self.cpus.is_empty() && !self.cpus.contains(cpu)) {
            bail!("processor {other} is none of those that this server was given for tests: see server --cpu");
        }
        Ok(wanted)
    }

    fn size(&self, crew: &mut Crew, control: &mut Control, plan: &Plan, index: usize) -> Result<()> {
        crew.prepare(plan, index)?;
        control.send(&Reply::Prepared)?;
        let usage = Usage::now();
        // With --compat as little as perftest has.
        let used = || (!plan.compat && !self.is_inner).then(|| usage.until(Usage::now()));
        let idle = !(plan.is_two_sided() || plan.bidirectional);
        if idle {
            // Nothing to do here but to be there. How long it takes is the client's business; see `Control::receive`.
            let theirs = finished(control, None)?;
            let cpu = used();
            let validated = crew.check(plan, index, &[], &theirs)?;
            return control.send(&Reply::Done { sent: Vec::new(), reverse: None, validated, cpu });
        }
        let shared = Shared::default();
        let (mut ours, mut theirs) = (Vec::new(), None);
        let outcomes = crew.run(plan, index, &shared, |watch| {
            let mut ended = false;
            while !(ended && theirs.is_some()) {
                match watch.next(control, None::<&OwnedFd>, false)? {
                    Happening::Sent(sent) => ours = sent,
                    Happening::Control => {
                        let sent = finished(control, Some(SETUP_LIMIT))?;
                        watch.expect(&sent);
                        theirs = Some(sent);
                    }
                    Happening::Failed(error) => return Err(error),
                    Happening::Ended => ended = true,
                    Happening::Interrupted | Happening::Tick => {}
                }
            }
            Ok(())
        })?;
        let cpu = used();
        let validated = outcomes.iter().map(|outcome| outcome.validated).sum::<u64>()
            + crew.check(plan, index, &ours, &theirs.unwrap_or_default())?;
        let reverse = plan.bidirectional.then(|| bandwidth(plan.sizes[index], &outcomes, self.clock));
        control.send(&Reply::Done { sent: ours, reverse, validated, cpu })
    }

    fn say(&self, what: std::fmt::Arguments<'_>) {
        if !self.is_inner {
            eprintln!("{what}");
        }
    }
}

/// What the client has sent, once it has.
fn finished(control: &mut Control, limit: Option<Duration>) -> Result<Vec<Vec<u64>>> {
    match control.receive(limit)? {
        Request::Finished { sent } => Ok(sent),
        Request::Failed { reason } => bail!("the client gave up: {reason}"),
        _ => bail!("the client does not go on as it should"),
    }
}
