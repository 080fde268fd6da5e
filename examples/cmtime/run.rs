//! Rounds at either end: one to warm up, one with queue pairs, and one without.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_safe::cm::{Id, PortSpace};
use rustix::event::{PollFd, PollFlags, poll};

use crate::peers::{Member, Peers, gather};
use crate::round::{Common, Kind, Round, Task};
use crate::table::Step;
use crate::{Options, Result, address_of};

/// How long a server waits for clients to end their connections, before it does.
const FAREWELL: Duration = Duration::from_secs(60);

/// How long a client that goes on may be ahead of what its server knows of its connections.
const AHEAD: Duration = Duration::from_secs(5);

/// One instance, with what it shares with the others.
struct Instance {
    common: Arc<Common>,
    peers: Peers,
    /// Whether they also wait for each other before they connect.
    in_mesh: bool,
}

/// The rounds with their titles; the last one only where there is one server and one client.
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

/// An id that listens; its name is of no connection.
fn listen(common: &Common, at: SocketAddr) -> Result<Id> {
    let mut listener = Id::new(&common.channel, PortSpace::TCP)?;
    listener.bind(at)?;
    listener.listen(0)?;
    Ok(listener)
}

fn instance(options: &Options) -> Result<Arc<Common>> {
    Common::new(options, Round::new(Kind::QueuePairs, options))
}

pub(crate) fn client(options: &Options, server: &str) -> Result<()> {
    let common = instance(options)?;
    let server = address_of(server, options.port, options.source()?)?;
    // One of rdma-core older than 52 has nobody to talk to by TCP.
    let peers = match Peers::controlled_by(server) {
        Ok(peers) => peers,
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => Peers::None,
        Err(error) => return Err(format!("cannot reach {server} by TCP: {error}").into()),
    };
    common.take_events()?;
    Instance { common, peers, in_mesh: false }.connect_all(&[server], true)
}

pub(crate) fn server(options: &Options) -> Result<()> {
    let common = instance(options)?;
    let at = address(options)?;
    let _listener = listen(&common, at)?;
    let sockets = TcpListener::bind(at)?;
    println!("cmtime: listening at {at}");
    // A client that asks at once for connections is one of rdma-core older than 52.
    let mut fds = [PollFd::new(&sockets, PollFlags::IN), PollFd::new(&common.channel, PollFlags::IN)];
    while let Err(error) = poll(&mut fds, None) {
        if error != rustix::io::Errno::INTR {
            return Err(error.into());
        }
    }
    let waits = !fds[0].revents().is_empty();
    if waits {
        let peers = Peers::accept(&sockets, 1)?;
        drop(sockets);
        common.take_events()?;
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
    common.take_events()?;
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

    /// All instances are at this step.
    fn reach(&self, round: &Round, step: Step) -> Result<()> {
        self.peers.reach(step, || round.check())
    }

    fn show(&self, round: &Round) {
        print!("{}", round.table(self.options().threads as usize));
    }

    fn connect_all(&self, servers: &[SocketAddr], without: bool) -> Result<()> {
        let count = servers.len() * self.options().connections as usize;
        // The queue pairs of a server of rdma-core 44 share what goes with the first of them, so that it serves one round only.
        let once = matches!(self.peers, Peers::None);
        if !once {
            println!("Warming up");
            self.connect(Kind::QueuePairs, servers, servers.len())?;
        }
        let without = without && !once;
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
        let (common, round) = (&self.common, Round::new(kind, self.options()));
        common.set_round(&round);
        let connections: Vec<_> = servers.iter().cycle().take(count).map(|server| round.add(Some(*server))).collect();
        self.reach(&round, Step::FullConnect)?;
        let each = |task: Task, step: Step, done: Step| {
            round.begin(step);
            for connection in &connections {
                common.let_do(task, connection);
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
        connections.iter().try_for_each(|connection| connection.ask())?;
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
        let round = Round::new(kind, self.options());
        self.common.set_round(&round);
        self.reach(&round, Step::FullConnect)?;
        if self.in_mesh {
            self.reach(&round, Step::Init)?;
        }
        let mut since = Instant::now();
        round.reach(Step::Connect, count, |happened| {
            if happened || !self.peers.is_waited_for()? {
                since = Instant::now();
            }
            match since.elapsed() > AHEAD {
                true => Err(other_count(round.count(Step::Connect).0, count)),
                false => Ok(()),
            }
        })?;
        self.reach(&round, Step::Connect)?;
        self.await_farewell(&round, count)?;
        self.reach(&round, Step::Disconnect)?;
        let made = round.count(Step::Connect).0;
        round.destroy()?;
        if made == count { Ok(round) } else { Err(other_count(made, count)) }
    }

    /// Waits until the clients have ended their connections, and ends those that they leave.
    fn await_farewell(&self, round: &Round, count: usize) -> Result<()> {
        let mut since = Instant::now();
        round.reach(Step::Disconnect, count, |_| {
            self.peers.is_waited_for()?;
            if since.elapsed() > FAREWELL {
                since = Instant::now();
                let ended = round.count(Step::Disconnect).1;
                eprintln!("cmtime: {} of {count} connections were not ended by their clients", count - ended);
                for connection in round.connections() {
                    self.common.let_do(Task::Disconnect, &connection);
                }
            }
            Ok(())
        })
    }

    /// Serves a client that waits for nobody: until all of the connections that it has made have ended.
    fn accept_until_ended(&self) -> Result<()> {
        let round = Round::new(Kind::QueuePairs, self.options());
        self.common.set_round(&round);
        // The first request is there already.
        self.common.take_events()?;
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

fn other_count(made: usize, expected: usize) -> Box<dyn std::error::Error + Send + Sync> {
    format!("the clients have made {made} connections instead of {expected}: give the same -c at all ends").into()
}
