//! Finding the device of a listener on this host, before a request is sent to it.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use rdma_sys::*;

use super::event::{CmEvent, Connected, Datagram, Parameters};
use super::id::{ConnectParameters, Id, Phase};
use crate::cm::Peer;
use crate::device::{Core, gid};
use crate::net::directory::{Lookup, LookupError};
use crate::net::presence::Process;
use crate::transport::Time;
use crate::wire::cm::{RejectReason, SidrStatus};

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
    timers: BTreeSet<(Time, u32)>,
}

struct Finding {
    /// The lookup, unless it has to be started again.
    lookup: Option<Lookup>,
    goal: Goal,
    deadline: Time,
    timer: Time,
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
    Connect(Box<ConnectParameters>),
}

impl Findings {
    pub(super) fn wake_at(&self) -> Option<Time> {
        self.timers.first().map(|(at, _)| *at)
    }

    fn add(&mut self, id: u32, finding: Finding) {
        if let Some(lookup) = &finding.lookup {
            self.by_lookup.insert(lookup.number(), id);
        }
        self.timers.insert((finding.timer, id));
        self.by_id.insert(id, finding);
    }

    /// Ends the lookup of an id.
    pub(super) fn remove(&mut self, id: u32) {
        self.take(id);
    }

    fn take(&mut self, id: u32) -> Option<Finding> {
        let finding = self.by_id.remove(&id)?;
        self.timers.remove(&(finding.timer, id));
        if let Some(lookup) = &finding.lookup {
            self.by_lookup.remove(&lookup.number());
        }
        Some(finding)
    }
}

impl Core {
    /// Looks up the device of a listener on this host, for at most `timeout`.
    ///
    /// # Errors
    /// The errno of a failed system call.
    pub(super) fn find_listener(&mut self, number: u32, goal: Goal, timeout: Duration, now: Time) -> Result<(), i32> {
        self.continue_finding(number, goal, now, now + timeout)
    }

    fn continue_finding(&mut self, number: u32, goal: Goal, now: Time, deadline: Time) -> Result<(), i32> {
        let cma = &mut self.state.cma;
        let id = cma.ids.get_mut(number).ok_or(libc::EINVAL)?;
        let directory = cma.directory.as_ref().ok_or(libc::EOPNOTSUPP)?;
        let destination = id.destination.ok_or(libc::EINVAL)?;
        let (lookup, timer) = match directory.lookup(id.space, destination.ip(), destination.port()) {
            Ok(lookup) => (Some(lookup), deadline),
            Err(LookupError::Busy) => (None, deadline.min(now + RETRY_INTERVAL)),
            Err(LookupError::System { source, .. }) => return Err(source.raw_os_error().unwrap_or(libc::EIO)),
            Err(LookupError::NobodyListens) if self.may_listen_again(number, &goal, now, deadline) => {
                (None, now + RETRY_INTERVAL)
            }
            Err(error) => {
                self.finish_without_listener(number, &goal, &error);
                return Ok(());
            }
        };
        let cma = &mut self.state.cma;
        let id = cma.ids.get_mut(number).ok_or(libc::EINVAL)?;
        id.phase = Phase::Finding;
        cma.findings.add(number, Finding { lookup, goal, deadline, timer });
        Ok(())
    }

    /// Whether to repeat a lookup that found no listener.
    ///
    /// True while another id of this process is connected to the same address and port, perhaps in another port space
    /// (`ib_send_bw -R -c UD`). The first lookup was [`TIMEOUT`] before the deadline.
    fn may_listen_again(&self, number: u32, goal: &Goal, now: Time, deadline: Time) -> bool {
        let ids = &self.state.cma.ids;
        let Some(id) = ids.get(number) else { return false };
        let is_connected = |of: &Id| of.phase == Phase::Connect && of.connection.is_some();
        matches!(goal, Goal::Connect(_))
            && now + TIMEOUT < deadline + LISTENS_AGAIN
            && ids.iter().any(|(other, of)| other != number && of.destination == id.destination && is_connected(of))
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
                Err(LookupError::Busy) => self.retry_finding(number, finding, now),
                Err(LookupError::NobodyListens)
                    if self.may_listen_again(number, &finding.goal, now, finding.deadline) =>
                {
                    self.retry_finding(number, finding, now);
                }
                Err(error) => self.finish_without_listener(number, &finding.goal, &error),
            }
        }
        self.update_cm(now);
    }

    fn finish_with_listener(&mut self, number: u32, goal: Goal, found: Found, now: Time) {
        match goal {
            Goal::Connect(parameters) => {
                if let Err(errno) = self.request(number, found.peer, Some(found.process), &parameters, now) {
                    self.state.cma.push_plain(number, RDMA_CM_EVENT_CONNECT_ERROR, -errno);
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

    fn finish_without_listener(&mut self, number: u32, goal: &Goal, error: &LookupError) {
        match goal {
            Goal::Connect(_) => {
                if let Some(id) = self.state.cma.ids.get_mut(number) {
                    id.phase = Phase::Connect;
                }
                self.report_nobody(number, error);
            }
            // The request looks the listener up again, and reports the error.
            Goal::Route => self.finish_route(number),
        }
    }

    pub(super) fn finish_route(&mut self, number: u32) {
        if let Some(id) = self.state.cma.ids.get_mut(number) {
            id.phase = Phase::RouteResolved;
        }
        self.state.cma.push_plain(number, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
    }

    fn retry_finding(&mut self, number: u32, finding: Finding, now: Time) {
        if let Err(errno) = self.continue_finding(number, finding.goal, now, finding.deadline) {
            self.state.cma.push_plain(number, RDMA_CM_EVENT_CONNECT_ERROR, -errno);
        }
    }

    /// Handles the timers of lookups that have expired.
    pub(super) fn expire_findings(&mut self, now: Time) {
        while let Some((at, number)) = self.state.cma.findings.timers.first().copied().filter(|(at, _)| *at <= now) {
            let Some(finding) = self.state.cma.findings.take(number) else {
                self.state.cma.findings.timers.remove(&(at, number));
                continue;
            };
            if finding.deadline > now {
                self.retry_finding(number, finding, now);
                continue;
            }
            let (phase, kind) = match finding.goal {
                Goal::Route => (Phase::AddressResolved, RDMA_CM_EVENT_ROUTE_ERROR),
                Goal::Connect(_) => (Phase::Connect, RDMA_CM_EVENT_UNREACHABLE),
            };
            if let Some(id) = self.state.cma.ids.get_mut(number) {
                id.phase = phase;
            }
            self.state.cma.push_plain(number, kind, -libc::ETIMEDOUT);
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
                    private_data: vec![0; 136],
                    ah_attr: ibv_ah_attr::zeroed(),
                    qp_num: 0,
                    qkey: 0,
                    membership: 0,
                };
                let SidrStatus(status) = SidrStatus::UNSUPPORTED;
                (RDMA_CM_EVENT_UNREACHABLE, status.into(), Parameters::Datagram(Box::new(service)))
            }
            LookupError::NobodyListens | LookupError::Busy => {
                let RejectReason(reason) = RejectReason::INVALID_SERVICE_ID;
                let rejected = Connected { private_data: vec![0; 148], ..Connected::default() };
                (RDMA_CM_EVENT_REJECTED, reason.into(), Parameters::Connected(rejected))
            }
        };
        self.state.cma.push(CmEvent { id, listener: None, kind, status, parameters });
    }
}
