//! The rounds of a client or server: one to warm up, one with queue pairs, and one without.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::Result;
use rdma_safe::cm::{Id, PortSpace};
use rustix::event::{PollFd, PollFlags, poll};

use crate::peers::{Member, Peers, gather};
use crate::round::{Common, Kind, Round, Task};
use crate::table::Step;
use crate::{Options, address_of};

/// Longest time that a server waits for its clients to disconnect.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// Longest time that a client may wait at the next step while the server still misses connections.
const ESTABLISH_TIMEOUT: Duration = Duration::from_secs(5);

/// This instance of the program.
struct Instance {
    common: Arc<Common>,
    peers: Peers,
    /// Whether the instances also wait for each other before they connect.
    in_mesh: bool,
}

/// The measured rounds with their titles. The second one is only for one server and one client.
fn rounds(options: &Options, verb: &str, count: usize) -> [(Kind, String); 2] {
    let measured = match options.mimic {
        None => (Kind::QueuePairs, format!("{verb} {count}, with queue pairs")),
        Some(delay) => {
            let kind = Kind::Simulated(Duration::from_micros(delay.into()));
            (kind, format!("{verb} {count}, with pauses of {delay} us for queue pairs"))
        }
    };
    [measured, (Kind::Simulated(Duration::ZERO), format!("{verb} {count}, without queue pairs"))]
}

fn address(options: &Options) -> Result<SocketAddr> {
    let own = options.source()?.unwrap_or((Ipv4Addr::UNSPECIFIED, 0).into());
    Ok(SocketAddr::new(own.ip(), options.port))
}

/// Creates a listening id.
fn listen(common: &Common, at: SocketAddr) -> Result<Id> {
    let mut listener = Id::new(&common.channel, PortSpace::TCP)?;
    listener.bind(at)?;
    listener.listen(0)?;
    Ok(listener)
}

fn instance(options: &Options) -> Result<Arc<Common>> {
    Common::new(options, Round::new(Kind::QueuePairs))
}

pub(crate) fn client(options: &Options, server: &str) -> Result<()> {
    let common = instance(options)?;
    let server = address_of(server, options.port, options.source()?)?;
    // A C server of rdma-core before 52 does not listen on TCP.
    let peers = match Peers::controlled_by(server) {
        Ok(peers) => peers,
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => Peers::None,
        Err(error) => return Err(format!("cannot reach {server} by TCP: {error}").into()),
    };
    common.handle_events()?;
    Instance { common, peers, in_mesh: false }.connect_all(&[server], true)
}

pub(crate) fn server(options: &Options) -> Result<()> {
    let common = instance(options)?;
    let at = address(options)?;
    let _listener = listen(&common, at)?;
    let sockets = TcpListener::bind(at)?;
    println!("cmtime: listening at {at}");
    // A C client of rdma-core before 52 sends connection requests at once, without TCP.
    let mut fds = [PollFd::new(&sockets, PollFlags::IN), PollFd::new(&common.channel, PollFlags::IN)];
    while let Err(error) = poll(&mut fds, None) {
        if error != rustix::io::Errno::INTR {
            return Err(error.into());
        }
    }
    let uses_tcp = !fds[0].revents().is_empty();
    if uses_tcp {
        let peers = Peers::accept(&sockets, 1)?;
        drop(sockets);
        common.handle_events()?;
        return Instance { common, peers, in_mesh: false }.accept_all(1, true);
    }
    drop(sockets);
    Instance { common, peers: Peers::None, in_mesh: false }.accept_until_ended()
}

pub(crate) fn among_peers(options: &Options, controller: &str) -> Result<()> {
    let common = instance(options)?;
    let count = options.peers as usize;
    let peers = gather(controller, options.port, count)?;
    let source = options.source()?.ok_or("no address")?;
    let listener = options.listen.then(|| listen(&common, source)).transpose()?;
    let address = listener.as_ref().and_then(Id::local_address).and_then(|address| address.ip());
    let all = peers.introduce(Member { address, listens: options.listen }, count)?;
    let servers: Vec<_> = all.iter().filter(|member| member.listens).filter_map(|member| member.address).collect();
    if servers.is_empty() || servers.len() == count {
        return Err(format!("{} of {count} instances are servers; give -L to some, not to all", servers.len()).into());
    }
    common.handle_events()?;
    let instance = Instance { common, peers, in_mesh: true };
    match options.listen {
        true => instance.accept_all(count - servers.len(), count == 2),
        false => instance.connect_all(&servers, count == 2),
    }
}

impl Instance {
    fn options(&self) -> &Options {
        &self.common.options
    }

    /// Waits until all instances have reached this step.
    fn reach(&self, round: &Round, step: Step) -> Result<()> {
        self.peers.reach(step, || round.check())
    }

    fn show(&self, round: &Round) {
        print!("{}", round.table(self.options().threads as usize));
    }

    fn connect_all(&self, servers: &[SocketAddr], without: bool) -> Result<()> {
        let count = servers.len() * self.options().connections as usize;
        // A C server of rdma-core 44 serves one round only: its queue pairs share objects that it destroys with the first one.
        let is_single_round = matches!(self.peers, Peers::None);
        if !is_single_round {
            println!("Warming up");
            self.connect(Kind::QueuePairs, servers, servers.len())?;
        }
        let without = without && !is_single_round;
        let measured = rounds(self.options(), "Connecting", count);
        for (kind, title) in measured.into_iter().take(1 + usize::from(without)) {
            println!("{title}");
            let round = self.connect(kind, servers, count)?;
            self.show(&round);
        }
        Ok(())
    }

    /// One round of a client.
    fn connect(&self, kind: Kind, servers: &[SocketAddr], count: usize) -> Result<Arc<Round>> {
        let (common, round) = (&self.common, Round::new(kind));
        common.set_round(&round);
        let connections: Vec<_> = servers.iter().cycle().take(count).map(|server| round.add(Some(*server))).collect();
        self.reach(&round, Step::FullConnect)?;
        let each = |task: Task, step: Step, done: Step| {
            round.begin(step);
            for connection in &connections {
                common.submit(task, connection);
            }
            round.reach(done, count, |_| self.peers.is_waited_for().map(drop))?;
            round.end(step);
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        };

        round.begin(Step::FullConnect);
        round.begin(Step::CreateId);
        connections.iter().try_for_each(|connection| connection.create(&common.channel))?;
        round.end(Step::CreateId);
        if let Some(source) = self.options().source()? {
            round.begin(Step::Bind);
            connections.iter().try_for_each(|connection| connection.bind(source))?;
            round.end(Step::Bind);
        }
        each(Task::ResolveAddress, Step::ResolveAddress, Step::ResolveAddress)?;
        each(Task::ResolveRoute, Step::ResolveRoute, Step::ResolveRoute)?;
        each(Task::CreateQp, Step::CreateQp, Step::CreateQp)?;
        each(Task::Init, Step::Init, Step::Init)?;
        if self.in_mesh {
            self.reach(&round, Step::Init)?;
        }
        round.begin(Step::Connect);
        connections.iter().try_for_each(|connection| connection.connect(common))?;
        round.reach(Step::Connect, count, |_| self.peers.is_waited_for().map(drop))?;
        round.end(Step::Connect);
        round.end(Step::FullConnect);
        self.reach(&round, Step::Connect)?;
        each(Task::Disconnect, Step::Disconnect, Step::Disconnect)?;
        self.reach(&round, Step::Disconnect)?;
        round.destroy()?;
        Ok(round)
    }

    fn accept_all(&self, clients: usize, without: bool) -> Result<()> {
        let count = clients * self.options().connections as usize;
        println!("Warming up");
        self.accept(Kind::QueuePairs, clients)?;
        let measured = rounds(self.options(), "Accepting", count);
        for (kind, title) in measured.into_iter().take(1 + usize::from(without)) {
            println!("{title}");
            let round = self.accept(kind, count)?;
            self.show(&round);
        }
        Ok(())
    }

    /// One round of a server.
    fn accept(&self, kind: Kind, count: usize) -> Result<Arc<Round>> {
        let round = Round::new(kind);
        self.common.set_round(&round);
        self.reach(&round, Step::FullConnect)?;
        if self.in_mesh {
            self.reach(&round, Step::Init)?;
        }
        let mut since = Instant::now();
        round.reach(Step::Connect, count, |has_progress| {
            if has_progress || !self.peers.is_waited_for()? {
                since = Instant::now();
            }
            match since.elapsed() > ESTABLISH_TIMEOUT {
                true => Err(wrong_count(round.count(Step::Connect).0, count)),
                false => Ok(()),
            }
        })?;
        self.reach(&round, Step::Connect)?;
        self.await_disconnects(&round, count)?;
        self.reach(&round, Step::Disconnect)?;
        let made = round.count(Step::Connect).0;
        round.destroy()?;
        if made == count { Ok(round) } else { Err(wrong_count(made, count)) }
    }

    /// Waits until the clients have disconnected. After a timeout, disconnects the remaining connections.
    fn await_disconnects(&self, round: &Round, count: usize) -> Result<()> {
        let mut since = Instant::now();
        round.reach(Step::Disconnect, count, |_| {
            self.peers.is_waited_for()?;
            if since.elapsed() > DISCONNECT_TIMEOUT {
                since = Instant::now();
                let ended = round.count(Step::Disconnect).1;
                eprintln!("cmtime: clients did not disconnect {} of {count} connections", count - ended);
                for connection in round.connections() {
                    self.common.submit(Task::Disconnect, &connection);
                }
            }
            Ok(())
        })
    }

    /// Serves a C client of rdma-core before 52, which does not synchronize: until all of its connections have ended.
    fn accept_until_ended(&self) -> Result<()> {
        let round = Round::new(Kind::QueuePairs);
        self.common.set_round(&round);
        // The first request has already arrived.
        self.common.handle_events()?;
        println!("Accepting, with queue pairs");
        let all_over = |round: &Round| {
            let (made, ended) = round.count(Step::Disconnect);
            made > 0 && made == ended
        };
        round.wait(all_over, |_| Ok(()))?;
        round.destroy()?;
        self.show(&round);
        Ok(())
    }
}

fn wrong_count(made: usize, expected: usize) -> Box<dyn std::error::Error + Send + Sync> {
    format!("the clients have made {made} connections instead of {expected}: give the same -c at all ends").into()
}
