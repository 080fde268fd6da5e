//! A round: connections that are made and closed together, and the threads that do so.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use common::Result;
use rdma_safe::cm::{CmId, ConnectParameters, Event, EventChannel, EventKind, Id, PortSpace};
use rdma_safe::{CompletionQueue, Device, ProtectionDomain, QueuePair, QueuePairState};

use crate::table::{Step, Times, table};
use crate::{Options, TICK};

/// Work for one connection, done by a worker thread.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Task {
    ResolveAddress,
    ResolveRoute,
    CreateQp,
    Init,
    /// Finishes a connection that the peer has accepted.
    Establish,
    /// Accepts a connection request.
    Accept,
    Disconnect,
}

/// Kind of the connections of a round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    QueuePairs,
    /// Without queue pairs: a pause replaces each call on a queue pair.
    Simulated(Duration),
}

/// One connection. At a server, its id is set later.
pub(crate) struct Connection {
    round: Arc<Round>,
    /// Address to connect to; `None` at a server.
    pub(crate) server: Option<SocketAddr>,
    state: Mutex<State>,
}

struct State {
    // Dropped before the id.
    qp: Option<QueuePair>,
    id: Option<Id>,
    times: Times,
    retries: u32,
    is_disconnected: bool,
}

pub(crate) struct Round {
    kind: Kind,
    connections: Mutex<Vec<Arc<Connection>>>,
    by_id: Mutex<HashMap<CmId, Arc<Connection>>>,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Default)]
struct Progress {
    /// Number of connections that have finished each step.
    done: [usize; Step::COUNT],
    times: Times,
    failed: Option<String>,
}

/// Domain of a device, and a completion queue that stays empty.
type Domain = (ProtectionDomain, CompletionQueue);

/// State that all rounds share.
pub(crate) struct Common {
    pub(crate) options: Options,
    pub(crate) channel: EventChannel,
    domains: Mutex<Vec<Arc<Domain>>>,
    tasks: Sender<(Task, Arc<Connection>)>,
    round: Mutex<Arc<Round>>,
    /// Next queue pair number of a connection without a queue pair. The next round uses other numbers, since the peer may have
    /// connections of the last round whose disconnect requests were lost.
    next_number: AtomicU32,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Round {
    pub(crate) fn new(kind: Kind) -> Arc<Self> {
        Arc::new(Round {
            kind,
            connections: Mutex::default(),
            by_id: Mutex::default(),
            progress: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    pub(crate) fn add(self: &Arc<Self>, server: Option<SocketAddr>) -> Arc<Connection> {
        let (times, retries) = (Times::default(), 0);
        let state = Mutex::new(State { qp: None, id: None, times, retries, is_disconnected: false });
        let connection = Arc::new(Connection { round: self.clone(), server, state });
        locked(&self.connections).push(connection.clone());
        connection
    }

    pub(crate) fn connections(&self) -> Vec<Arc<Connection>> {
        locked(&self.connections).clone()
    }

    pub(crate) fn begin(&self, step: Step) {
        locked(&self.progress).times.begin(step);
    }

    pub(crate) fn end(&self, step: Step) {
        locked(&self.progress).times.end(step);
    }

    fn done(&self, step: Step) {
        locked(&self.progress).done[step as usize] += 1;
        self.changed.notify_all();
    }

    fn fail(&self, reason: &dyn std::fmt::Display) {
        locked(&self.progress).failed.get_or_insert_with(|| reason.to_string());
        self.changed.notify_all();
    }

    pub(crate) fn check(&self) -> Result<()> {
        locked(&self.progress).failed.as_ref().map_or(Ok(()), |reason| Err(reason.clone().into()))
    }

    /// Returns the number of connections, and how many of them have finished `step`.
    pub(crate) fn count(&self, step: Step) -> (usize, usize) {
        (locked(&self.connections).len(), locked(&self.progress).done[step as usize])
    }

    /// Waits until `is_done` returns true. Calls `tick` at intervals, with whether there was progress since the last call.
    pub(crate) fn wait(&self, is_done: impl Fn(&Self) -> bool, mut tick: impl FnMut(bool) -> Result<()>) -> Result<()> {
        let mut before = [0; Step::COUNT];
        loop {
            self.check()?;
            if is_done(self) {
                return Ok(());
            }
            let progress = locked(&self.progress);
            if progress.done == before && progress.failed.is_none() {
                let (progress, waited) =
                    self.changed.wait_timeout(progress, TICK).unwrap_or_else(PoisonError::into_inner);
                let has_progress = progress.done != before;
                drop(progress);
                if waited.timed_out() {
                    tick(has_progress)?;
                }
            } else {
                before = progress.done;
            }
        }
    }

    /// Waits until `count` connections have finished `step`.
    pub(crate) fn reach(&self, step: Step, count: usize, tick: impl FnMut(bool) -> Result<()>) -> Result<()> {
        self.wait(|round| round.count(step).1 >= count, tick)
    }

    /// Destroys the queue pairs, then the ids.
    pub(crate) fn destroy(&self) -> Result<()> {
        let connections = self.connections();
        self.begin(Step::DestroyQp);
        for connection in &connections {
            let mut state = locked(&connection.state);
            let qp = state.qp.take();
            state.timed(Step::DestroyQp, |_| qp.map_or(Ok(()), QueuePair::destroy))?;
        }
        self.end(Step::DestroyQp);
        locked(&self.by_id).clear();
        self.begin(Step::DestroyId);
        for connection in &connections {
            let mut state = locked(&connection.state);
            let id = state.id.take();
            state.timed(Step::DestroyId, |_| id.map_or(Ok(()), Id::destroy))?;
        }
        self.end(Step::DestroyId);
        Ok(())
    }

    pub(crate) fn table(&self, threads: usize) -> String {
        let each: Vec<_> =
            self.connections().iter().map(|connection| locked(&connection.state).times.clone()).collect();
        table(self.kind == Kind::QueuePairs, threads, &locked(&self.progress).times, &each)
    }
}

impl State {
    fn timed<T>(&mut self, step: Step, action: impl FnOnce(&mut Self) -> rdma_safe::Result<T>) -> Result<T> {
        self.times.begin(step);
        let result = action(self)?;
        self.times.end(step);
        Ok(result)
    }

    fn parameters(&self, common: &Common) -> ConnectParameters {
        let number = || common.next_number.fetch_add(1, Ordering::Relaxed) & 0xff_ffff;
        let number = self.qp.as_ref().map_or_else(number, QueuePair::number);
        ConnectParameters::new(number).responder_resources(1).initiator_depth(1)
    }

    fn id(&mut self) -> Result<&mut Id> {
        self.id.as_mut().ok_or_else(|| "the connection has no id".into())
    }
}

impl Connection {
    pub(crate) fn create(self: &Arc<Self>, channel: &EventChannel) -> Result<()> {
        let mut state = locked(&self.state);
        state.times.begin(Step::FullConnect);
        let id = state.timed(Step::CreateId, |_| Id::new(channel, PortSpace::TCP))?;
        locked(&self.round.by_id).insert(id.id(), self.clone());
        state.id = Some(id);
        Ok(())
    }

    pub(crate) fn bind(&self, source: SocketAddr) -> Result<()> {
        locked(&self.state).timed(Step::Bind, |state| state.id.as_mut().map_or(Ok(()), |id| id.bind(source)))
    }

    /// Sends the connection request.
    pub(crate) fn connect(&self, common: &Common) -> Result<()> {
        let mut state = locked(&self.state);
        let parameters = state.parameters(common);
        state.times.begin(Step::Connect);
        Ok(state.id()?.connect(&parameters)?)
    }

    fn resolve_address(&self, state: &mut State, common: &Common) -> Result<()> {
        let server = self.server.ok_or("the connection has no server address")?;
        let (source, timeout) = (common.options.source()?, common.options.timeout());
        Ok(state.id()?.resolve_address(source.map(Into::into), server, timeout)?)
    }

    fn create_qp(&self, state: &mut State, common: &Common) -> Result<()> {
        match self.round.kind {
            Kind::QueuePairs => {
                let domain = common.domain(state.id()?)?;
                let (pd, cq) = &*domain;
                let builder = || pd.queue_pair(cq, cq).send_depth(1).recv_depth(1).build();
                state.qp = Some(state.timed(Step::CreateQp, |_| builder())?);
            }
            Kind::Simulated(delay) => state.timed(Step::CreateQp, |_| pause(delay))?,
        }
        self.round.done(Step::CreateQp);
        Ok(())
    }

    /// Moves the queue pair to the state, if the connection has one.
    fn modify_qp(&self, state: &mut State, to: QueuePairState, attributes: Step, change: Step) -> Result<()> {
        state.id()?;
        let found = state.timed(attributes, |state| state.id.as_ref().map(|id| id.attributes(to)).transpose())?;
        match (&self.round.kind, found) {
            (Kind::Simulated(delay), _) => state.timed(change, |_| pause(*delay))?,
            (Kind::QueuePairs, found) => state.timed(change, |state| match (&mut state.qp, &found) {
                (Some(qp), Some(found)) => qp.modify(found),
                _ => Ok(()),
            })?,
        }
        self.round.done(change);
        Ok(())
    }

    fn move_to_rts(&self, state: &mut State) -> Result<()> {
        self.modify_qp(state, QueuePairState::RTR, Step::RtrAttributes, Step::Rtr)?;
        self.modify_qp(state, QueuePairState::RTS, Step::RtsAttributes, Step::Rts)
    }

    fn run(&self, task: Task, common: &Common) -> Result<()> {
        let mut guard = locked(&self.state);
        let state = &mut *guard;
        match task {
            Task::ResolveAddress => {
                state.retries = common.options.retries;
                state.times.begin(Step::ResolveAddress);
                self.resolve_address(state, common)?;
            }
            Task::ResolveRoute => {
                state.retries = common.options.retries;
                state.times.begin(Step::ResolveRoute);
                state.id()?.resolve_route(common.options.timeout())?;
            }
            Task::CreateQp => self.create_qp(state, common)?,
            Task::Init => self.modify_qp(state, QueuePairState::INIT, Step::InitAttributes, Step::Init)?,
            Task::Establish => {
                self.move_to_rts(state)?;
                state.timed(Step::Establish, |state| state.id.as_mut().map_or(Ok(()), Id::establish))?;
                state.times.end(Step::Connect);
                state.times.end(Step::FullConnect);
                self.round.done(Step::Connect);
            }
            Task::Accept => {
                self.create_qp(state, common)?;
                self.modify_qp(state, QueuePairState::INIT, Step::InitAttributes, Step::Init)?;
                self.move_to_rts(state)?;
                let parameters = state.parameters(common);
                state.id()?.accept(&parameters)?;
            }
            Task::Disconnect if state.is_disconnected => {}
            Task::Disconnect => {
                state.is_disconnected = true;
                state.times.begin(Step::Disconnect);
                // Fails if the peer disconnects at the same moment.
                let _ = state.id()?.disconnect();
                state.times.end(Step::Disconnect);
                self.round.end(Step::Disconnect);
                self.round.done(Step::Disconnect);
            }
        }
        Ok(())
    }
}

fn pause(time: Duration) -> rdma_safe::Result<()> {
    if !time.is_zero() {
        std::thread::sleep(time);
    }
    Ok(())
}

impl Common {
    /// Starts the worker threads.
    pub(crate) fn new(options: &Options, round: Arc<Round>) -> Result<Arc<Self>> {
        let (tasks, receiver) = channel::<(Task, Arc<Connection>)>();
        let common = Arc::new(Common {
            options: options.clone(),
            channel: EventChannel::new()?,
            domains: Mutex::default(),
            tasks,
            round: Mutex::new(round),
            next_number: AtomicU32::new(options.base_number),
        });
        let receiver = Arc::new(Mutex::new(receiver));
        for _ in 0..options.threads {
            let (common, receiver) = (common.clone(), receiver.clone());
            std::thread::Builder::new().name("tasks".into()).spawn(move || common.work(&receiver))?;
        }
        Ok(common)
    }

    /// Starts the thread that handles events.
    pub(crate) fn handle_events(self: &Arc<Self>) -> Result<()> {
        let common = self.clone();
        std::thread::Builder::new().name("events".into()).spawn(move || {
            loop {
                match common.channel.wait(Duration::from_secs(3600)) {
                    Ok(Some(event)) => common.handle(event),
                    Ok(None) => {}
                    Err(error) => return locked(&common.round).fail(&error),
                }
            }
        })?;
        Ok(())
    }

    /// Adds new connections to this round from now on.
    pub(crate) fn set_round(&self, round: &Arc<Round>) {
        *locked(&self.round) = round.clone();
    }

    pub(crate) fn submit(&self, task: Task, connection: &Arc<Connection>) {
        // Cannot fail: the receiver lives as long as the process.
        let _ = self.tasks.send((task, connection.clone()));
    }

    fn work(&self, tasks: &Mutex<Receiver<(Task, Arc<Connection>)>>) {
        loop {
            let next = locked(tasks).recv();
            let Ok((task, connection)) = next else { return };
            if let Err(error) = connection.run(task, self) {
                connection.round.fail(&error);
            }
        }
    }

    fn domain(&self, id: &Id) -> Result<Arc<Domain>> {
        let name = id.device_name().ok_or("the id has no device")?;
        let mut domains = locked(&self.domains);
        if let Some(found) = domains.iter().find(|domain| domain.0.context().device_name() == name) {
            return Ok(found.clone());
        }
        let context = Device::by_name(&name)?.open()?;
        let made = Arc::new((context.alloc_pd()?, context.completion_queue(1).build()?));
        domains.push(made.clone());
        Ok(made)
    }

    fn handle(&self, event: Event) {
        let round = locked(&self.round).clone();
        if let EventKind::ConnectRequest(id, _) = event.kind {
            let connection = round.add(None);
            if round.count(Step::Connect).0 == 1 {
                round.begin(Step::Connect);
            }
            locked(&round.by_id).insert(id.id(), connection.clone());
            locked(&connection.state).id = Some(id);
            return self.submit(Task::Accept, &connection);
        }
        let connection = locked(&round.by_id).get(&event.id).cloned();
        match (event.kind, connection) {
            (EventKind::DeviceRemoval, _) => round.fail(&"the device is being removed"),
            // An event of the listener, or of the previous round, whose ids are being destroyed.
            (_, None) => {}
            (kind, Some(connection)) => {
                if let Err(error) = self.handle_for(&connection, kind) {
                    round.fail(&error);
                }
            }
        }
    }

    fn handle_for(&self, connection: &Arc<Connection>, kind: EventKind) -> Result<()> {
        let round = &connection.round;
        let finish = |step: Step| {
            locked(&connection.state).times.end(step);
            round.done(step);
        };
        match kind {
            EventKind::AddressResolved => finish(Step::ResolveAddress),
            EventKind::RouteResolved => finish(Step::ResolveRoute),
            EventKind::AddressError(errno) => {
                let mut state = locked(&connection.state);
                state.retries =
                    state.retries.checked_sub(1).ok_or_else(|| format!("resolving the address: {errno}"))?;
                connection.resolve_address(&mut state, self)?;
            }
            EventKind::RouteError(errno) => {
                let mut state = locked(&connection.state);
                state.retries = state.retries.checked_sub(1).ok_or_else(|| format!("resolving the route: {errno}"))?;
                state.id()?.resolve_route(self.options.timeout())?;
            }
            EventKind::ConnectResponse(_) => self.submit(Task::Establish, connection),
            EventKind::Established(_) => {
                // The last connection sets the end of the round's step.
                round.end(Step::Connect);
                round.done(Step::Connect);
            }
            // The client disconnects first, and does not wait for the answer of the server.
            EventKind::Disconnected if connection.server.is_some() => {}
            EventKind::Disconnected => {
                if round.count(Step::Disconnect).1 == 0 {
                    round.begin(Step::Disconnect);
                }
                self.submit(Task::Disconnect, connection);
            }
            EventKind::Rejected(reason, _) => return Err(format!("connecting: {reason}").into()),
            EventKind::Unreachable(errno) | EventKind::ConnectError(errno) => {
                return Err(format!("connecting: {errno}").into());
            }
            EventKind::TimewaitExit => {}
            other => return Err(format!("unexpected event of a connection: {other:?}").into()),
        }
        Ok(())
    }
}
