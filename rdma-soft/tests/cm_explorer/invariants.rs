//! Invariants of every state, and of quiescent states.

use rdma_soft::cm::{Negotiated, Phase};

use crate::support::host::{Host, Stage};
use crate::world::{Connection, State, World};

/// Checks a state.
///
/// # Errors
/// A text with the broken invariant.
pub(crate) fn check(world: &World, state: &State) -> Result<(), String> {
    for a in established(world, state, 0) {
        for b in established(world, state, 1) {
            let a_reaches_b = a.negotiated.remote_qpn == b.negotiated.local_qpn;
            let b_reaches_a = b.negotiated.remote_qpn == a.negotiated.local_qpn;
            if (a_reaches_b || b_reaches_a) && !are_peers(&a.negotiated, &b.negotiated) {
                return Err("an old connection uses the queue pair number of another connection".to_owned());
            }
        }
    }
    if is_quiescent(world, state) { check_quiescent(world, state) } else { Ok(()) }
}

fn established<'a>(world: &'a World, state: &State, host: usize) -> impl Iterator<Item = &'a Connection> {
    let connections = world.info(state, host).connections.iter();
    connections.filter(|connection| connection.phase == Phase::Established)
}

/// Whether two connections are the ends of the same handshake.
pub(crate) fn are_peers(a: &Negotiated, b: &Negotiated) -> bool {
    let is_end = |a: &Negotiated, b: &Negotiated| a.send_psn == b.receive_psn && a.remote_qpn == b.local_qpn;
    is_end(a, b) && is_end(b, a)
}

/// Whether no packet, timer or mandatory step is left.
pub(crate) fn is_quiescent(world: &World, state: &State) -> bool {
    !state.has_packets()
        && [0, 1].into_iter().all(|host| {
            let info = world.info(state, usize::from(host));
            info.timers.is_empty() && info.mandatory.is_empty() && world.keepalives(state, host).next().is_none()
        })
}

fn check_quiescent(world: &World, state: &State) -> Result<(), String> {
    let hosts = [0, 1].map(|host| &*world.info(state, host).host);
    let is_begun = hosts.iter().all(|host| host.starts == 0);
    if world.settings.must_connect && is_begun {
        if let Some(host) = hosts.iter().find(|host| host.sessions.is_empty()) {
            return Err(format!("host {} has no connection", host.number));
        }
    }
    check_end(&hosts)
}

/// Checks quiescent hosts: each connection is established at both sides.
///
/// # Errors
/// A text with the broken invariant.
pub(crate) fn check_end(hosts: &[&Host]) -> Result<(), String> {
    for host in hosts {
        if let Some(session) = host.sessions.iter().find(|session| session.stage != Stage::Established) {
            return Err(format!("host {} never learns the end of {session:?}", host.number));
        }
        if !host.lookups.is_empty() || host.manager.lookup_counts() != (0, 0) {
            return Err(format!("host {} has an unfinished lookup", host.number));
        }
        if host.manager.counts() != (0, host.sessions.len()) {
            return Err(format!("host {} has a connection that its program does not know", host.number));
        }
        for session in &host.sessions {
            let peer = hosts[usize::from(session.peer)];
            let mut of_peer = peer.sessions.iter().filter_map(|of| peer.manager.negotiated(of.id));
            let own = host.manager.negotiated(session.id).ok_or("no connection")?;
            if !of_peer.any(|of| are_peers(own, of)) {
                return Err(format!("host {} has a half-open queue pair {}", host.number, own.local_qpn));
            }
        }
    }
    Ok(())
}
