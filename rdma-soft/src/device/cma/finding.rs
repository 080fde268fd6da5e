//! Finding the device of a listener on this host, before a request is sent to it.

use std::collections::HashMap;
use std::time::Duration;

use rdma_sys::*;

use super::event::{CmEvent, ConnectionParameters, Datagram, Parameters};
use super::id::{Id, IdState};
use crate::cm::{Peer, Timers};
use crate::device::{Core, gid};
use crate::net::directory::{Lookup, LookupError};
use crate::net::presence::Process;
use crate::transport::Time;
use crate::wire::cm::{Rej, RejectReason, SidrRep, SidrStatus};

/// Longest wait for a listener whose process does not run. On a network, a request is retransmitted for 24.5 s.
pub(super) const TIMEOUT: Duration = Duration::from_secs(25);

/// Interval between attempts if too many lookups wait for a listener, or if it may listen again.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// How long a request waits for a listener that has accepted another connection of this process and has closed.
///
/// `ib_send_bw -R` makes a control connection, closes its listener, tells the client to connect again, and then listens again. Its
/// client cannot repeat a rejected request. On a network the request takes longer than these steps, but not on one host.
const LISTENS_AGAIN: Duration = Duration::from_secs(2);

/// Lookups in the directory of listeners.
#[derive(Default)]
pub(super) struct Findings {
    by_id: HashMap<u32, Finding>,
    /// Ids by lookup.
    by_lookup: HashMap<u64, u32>,
    timers: Timers,
}

struct Finding {
    /// The lookup, unless it has to be started again.
    lookup: Option<Lookup>,
    goal: Goal,
    deadline: Time,
    /// Until when a listener that has closed may listen again.
    listens_again: Time,
}

/// The device of a listener on this host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(super) peer: Peer,
    pub(super) process: Process,
}

/// What the result of a lookup is for.
pub(super) enum Goal {
    /// The route to the peer.
    Route,
    /// A request, which the peer gets at once.
    Connect(Box<ConnectionParameters>),
}

impl Findings {
    pub(super) fn wake_at(&self) -> Option<Time> {
        self.timers.first().map(|(at, _)| at)
    }

    fn add(&mut self, id: u32, finding: Finding, timer: Time) {
        if let Some(lookup) = &finding.lookup {
            self.by_lookup.insert(lookup.number(), id);
        }
        self.timers.set(id, timer);
        self.by_id.insert(id, finding);
    }

    /// Ends the lookup of an id.
    pub(super) fn remove(&mut self, id: u32) {
        self.take(id);
    }

    fn take(&mut self, id: u32) -> Option<Finding> {
        let finding = self.by_id.remove(&id)?;
        self.timers.clear(id);
        if let Some(lookup) = &finding.lookup {
            self.by_lookup.remove(&lookup.number());
        }
        Some(finding)
    }
}

impl Core {
    /// Looks up the device of a listener on this host, for at most `timeout`. An event reports the result.
    ///
    /// # Errors
    /// `EOPNOTSUPP` without a directory.
    pub(super) fn find_listener(&mut self, number: u32, goal: Goal, timeout: Duration, now: Time) -> Result<(), i32> {
        if self.state.cma.directory.is_none() {
            return Err(libc::EOPNOTSUPP);
        }
        let finding = Finding { lookup: None, goal, deadline: now + timeout, listens_again: now + LISTENS_AGAIN };
        self.continue_finding(number, finding, now);
        Ok(())
    }

    fn continue_finding(&mut self, number: u32, finding: Finding, now: Time) {
        let cma = &mut self.state.cma;
        let Some(Id { space, destination: Some(to), state, .. }) = cma.ids.get_mut(number) else { return };
        let Some(directory) = &cma.directory else { return };
        *state = IdState::Finding;
        match directory.lookup(*space, to.ip(), to.port()) {
            Ok(lookup) => {
                let timer = finding.deadline;
                cma.findings.add(number, Finding { lookup: Some(lookup), ..finding }, timer);
            }
            Err(error) => self.handle_no_listener(number, finding, &error, now),
        }
    }

    /// Repeats a lookup that has found nobody, if there may be a listener later. Otherwise it ends.
    fn handle_no_listener(&mut self, number: u32, finding: Finding, error: &LookupError, now: Time) {
        let is_repeated = match error {
            LookupError::Busy => true,
            LookupError::NobodyListens => now < finding.listens_again && self.may_listen_again(number, &finding.goal),
            _ => false,
        };
        if is_repeated {
            let timer = finding.deadline.min(now + RETRY_INTERVAL);
            return self.state.cma.findings.add(number, Finding { lookup: None, ..finding }, timer);
        }
        match finding.goal {
            Goal::Connect(_) => {
                if let Some(id) = self.state.cma.ids.get_mut(number) {
                    id.state = IdState::Connect;
                }
                self.report_nobody(number, error);
            }
            // The request looks the listener up again, and reports the error.
            Goal::Route => self.finish_route(number),
        }
    }

    /// Whether a request that finds no listener may find one later.
    ///
    /// True while another id of this process is connected to the same address and port, perhaps in another port space
    /// (`ib_send_bw -R -c UD`).
    fn may_listen_again(&self, number: u32, goal: &Goal) -> bool {
        let ids = &self.state.cma.ids;
        let Some(id) = ids.get(number) else { return false };
        let is_connected = |other: &Id| other.state == IdState::Connect && other.connection.is_some();
        matches!(goal, Goal::Connect(_))
            && ids.iter().any(|(at, other)| at != number && other.destination == id.destination && is_connected(other))
    }

    /// Answers lookups of other processes, continues with the results of own lookups, and ends the connections of processes that
    /// have ended.
    pub(in crate::device) fn handle_host_events(&mut self, now: Time) {
        self.handle_presence(now);
        let Some(directory) = self.state.cma.directory.take() else { return };
        let own: Vec<_> = self.links.iter().map(|link| link.socket.address()).collect();
        let mut found = Vec::new();
        directory.handle_events(&own, &mut |event| found.push(event));
        self.state.cma.directory = Some(directory);
        for event in found {
            let Some(number) = self.state.cma.findings.by_lookup.get(&event.lookup).copied() else { continue };
            let Some(finding) = self.state.cma.findings.take(number) else { continue };
            let bound = self.state.cma.ids.get(number).and_then(|id| id.link);
            let result = event.result.map(|process| {
                let address = process.address;
                let fits = |link: &usize| own.get(*link).is_some_and(|own| own.is_ipv4() == address.is_ipv4());
                let link = bound.into_iter().chain(0..own.len()).find(fits).unwrap_or(0);
                Found { peer: Peer { link, address, is_local: true }, process }
            });
            match result {
                Ok(found) => self.finish_with_listener(number, finding.goal, found, now),
                Err(error) => self.handle_no_listener(number, finding, &error, now),
            }
        }
        self.update_cm(now);
    }

    fn finish_with_listener(&mut self, number: u32, goal: Goal, found: Found, now: Time) {
        match goal {
            Goal::Connect(parameters) => {
                if let Err(errno) = self.request(number, found.peer, Some(found.process), &parameters, now) {
                    self.end_finding(number, IdState::Connect, RDMA_CM_EVENT_CONNECT_ERROR, -errno);
                }
            }
            Goal::Route => {
                if let Some(id) = self.state.cma.ids.get_mut(number) {
                    id.found = Some(found);
                    id.remote_gid = Some(gid(found.peer.address));
                }
                self.finish_route(number);
            }
        }
    }

    /// Moves an id to a state, and reports an event.
    fn end_finding(&mut self, number: u32, state: IdState, kind: rdma_cm_event_type, status: i32) {
        if let Some(id) = self.state.cma.ids.get_mut(number) {
            id.state = state;
        }
        self.state.cma.push_plain(number, kind, status);
    }

    pub(super) fn finish_route(&mut self, number: u32) {
        self.end_finding(number, IdState::RouteResolved, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
    }

    /// Handles the timers of lookups that have expired.
    pub(super) fn expire_findings(&mut self, now: Time) {
        while let Some((_, number)) = self.state.cma.findings.timers.first().filter(|(at, _)| *at <= now) {
            let Some(finding) = self.state.cma.findings.take(number) else { return };
            if finding.deadline > now {
                self.continue_finding(number, finding, now);
                continue;
            }
            let (state, kind) = match finding.goal {
                Goal::Route => (IdState::AddressResolved, RDMA_CM_EVENT_ROUTE_ERROR),
                Goal::Connect(_) => (IdState::Connect, RDMA_CM_EVENT_UNREACHABLE),
            };
            self.end_finding(number, state, kind, -libc::ETIMEDOUT);
        }
    }

    /// Reports that no request can be sent. Without a listener, it is the event that a rejection by the peer causes.
    fn report_nobody(&mut self, id: u32, error: &LookupError) {
        let is_datagram = self.state.cma.ids.get(id).is_some_and(Id::is_datagram);
        let (kind, status, parameters) = match error {
            LookupError::OtherUser { .. } => (RDMA_CM_EVENT_UNREACHABLE, -libc::EACCES, Parameters::None),
            LookupError::OtherVersion { .. } => (RDMA_CM_EVENT_UNREACHABLE, -libc::EPROTONOSUPPORT, Parameters::None),
            LookupError::System { source, .. } => {
                (RDMA_CM_EVENT_UNREACHABLE, -source.raw_os_error().unwrap_or(libc::EIO), Parameters::None)
            }
            LookupError::NobodyListens | LookupError::Busy if is_datagram => {
                let service = Datagram {
                    private_data: vec![0; SidrRep::PRIVATE_DATA],
                    ah_attr: ibv_ah_attr::zeroed(),
                    qp_num: 0,
                    qkey: 0,
                    membership: None,
                };
                let SidrStatus(status) = SidrStatus::UNSUPPORTED;
                (RDMA_CM_EVENT_UNREACHABLE, status.into(), Parameters::Datagram(Box::new(service)))
            }
            LookupError::NobodyListens | LookupError::Busy => {
                let RejectReason(reason) = RejectReason::INVALID_SERVICE_ID;
                let rejected = ConnectionParameters {
                    private_data: vec![0; Rej::PRIVATE_DATA],
                    ..ConnectionParameters::default()
                };
                (RDMA_CM_EVENT_REJECTED, reason.into(), Parameters::Connected(rejected))
            }
        };
        self.state.cma.push(CmEvent { id, listener: None, kind, status, parameters });
    }
}
