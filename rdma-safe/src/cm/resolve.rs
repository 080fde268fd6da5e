//! Resolving addresses and routes.

use std::time::Duration;

use super::attempt::{Cause, Step};
use super::handshake::{Arrival, Handshake, Outcome, Progress};
use super::side::Side;
use super::{Address, Connector, EventKind, PortSpace};
use crate::{Error, ProtectionDomain, Result};

/// The state of a handshake that finds a device and a route.
#[derive(Debug)]
pub struct Resolve {
    pub(super) connector: Connector,
    destination: Address,
    /// Retries left in this step.
    retries: u32,
}

/// A result of resolving an address.
pub(super) trait Resolved: Outcome<State = Resolve> {
    /// Whether the route is resolved, too, or only the device is found.
    const HAS_ROUTE: bool;

    fn new(side: Side, pd: ProtectionDomain, connector: &Connector, destination: Address) -> Self;
}

impl Resolve {
    /// Starts to resolve `destination`.
    pub(super) fn start<T: Resolved>(
        connector: &Connector,
        space: PortSpace,
        destination: Address,
    ) -> Result<Handshake<T>> {
        let side = connector.side(space, destination)?;
        let state = Resolve { connector: connector.clone(), destination, retries: 0 };
        Resolve::start_step(Handshake::ready(state, side, Step::ResolveAddress), Step::ResolveAddress)
    }

    /// Binds to `source`, whose device need not be resolved.
    pub(super) fn bind<T: Resolved>(
        connector: &Connector,
        space: PortSpace,
        destination: Address,
        source: Address,
    ) -> Result<Handshake<T>> {
        let mut side = connector.side(space, destination)?;
        side.id.bind(source).map_err(|error| side.call_failed(Step::ResolveAddress, error))?;
        let state = Resolve { connector: connector.clone(), destination, retries: 0 };
        Ok(Handshake::ready(state, side, Step::ResolveAddress))
    }

    /// Starts a step, with all its retries.
    fn start_step<T: Resolved>(mut handshake: Handshake<T>, step: Step) -> Result<Handshake<T>> {
        handshake.state.retries = handshake.state.connector.resolve_retries;
        Resolve::try_step(handshake, step)
    }

    /// Tries a step once.
    fn try_step<T: Resolved>(mut handshake: Handshake<T>, step: Step) -> Result<Handshake<T>> {
        let Handshake { state: Resolve { connector, destination, .. }, side, .. } = &mut handshake;
        let timeout = connector.resolve_timeout;
        let started = match step {
            Step::ResolveRoute => side.id.resolve_route(timeout),
            _ => side.id.resolve_address(connector.source, *destination, timeout),
        };
        started.map_err(|error| side.call_failed(step, error))?;
        // The kernel reports the timeout, so wait slightly longer.
        handshake.wait_for(step, timeout.saturating_add(Duration::from_secs(1)));
        Ok(handshake)
    }

    /// Handles an event of a step. `None` stands for the device of an id that was bound.
    fn advance<T: Resolved>(mut handshake: Handshake<T>, event: Option<EventKind>) -> Result<Progress<T>> {
        let step = handshake.step();
        match (step, event) {
            (Step::ResolveAddress, Some(EventKind::AddressResolved)) if T::HAS_ROUTE => {
                Resolve::start_step(handshake, Step::ResolveRoute).map(Progress::Pending)
            }
            (Step::ResolveAddress, Some(EventKind::AddressResolved) | None)
            | (Step::ResolveRoute, Some(EventKind::RouteResolved)) => {
                let Handshake { side, state: Resolve { connector, destination, .. }, .. } = handshake;
                let pd = connector.devices.domain_of(&side.id)?;
                Ok(Progress::Ready(T::new(side, pd, &connector, destination)))
            }
            (_, Some(EventKind::AddressError(_) | EventKind::RouteError(_))) if handshake.state.retries > 0 => {
                handshake.state.retries -= 1;
                Resolve::try_step(handshake, step).map(Progress::Pending)
            }
            (_, other) => Err(handshake.side.error(step, other.as_ref().map_or(Cause::Unexpected, Cause::of))),
        }
    }
}

macro_rules! impl_outcome {
    ($($name:ty),+) => {
        $(impl Outcome for $name {
            type Error = Error;
            type Context = ();
            type State = Resolve;

            fn handle(handshake: Handshake<Self>, arrival: Arrival, (): &mut ()) -> Result<Progress<Self>> {
                Resolve::advance(handshake, arrival.0?)
            }
        })+
    };
}

impl_outcome!(super::Route, super::DatagramRoute, super::GroupRoute);
