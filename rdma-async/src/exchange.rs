//! Connections whose addresses the programs exchange, without a connection manager.

use std::fmt;

use rdma_safe::{ProtectionDomain, QueuePairAddress};

use crate::opening::{Guard, Plan, post_receives_in};
use crate::{Connection, Connector, Error, Result, Sharing};

/// One end of a connection that knows its peer not yet. Made by [`Connector::prepare`].
pub struct Unconnected<S: Sharing> {
    // Dropped first: it removes the endpoint.
    guard: Guard<S>,
    plan: Plan<S>,
    address: QueuePairAddress,
}

impl<S: Sharing> Connector<S> {
    /// Prepares a connection in this domain to a peer whose address the program learns by other means, such as TCP or a file.
    ///
    /// Its receives are posted. Such a connection has no keepalive unless both ends allow it, and its peer does not learn that
    /// it is closed.
    ///
    /// # Errors
    /// [`Error::Memory`]; [`Error::NoReceives`]; [`Error::Rdma`]; [`Error::DriverStopped`].
    pub async fn prepare(&self, pd: &ProtectionDomain) -> Result<Unconnected<S>> {
        let options = crate::options::Options { keepalive: None, ..self.options.clone() };
        let mut plan = Plan::new(&self.driver, &options, self.shared.as_ref(), pd)?.with_memory().await?;
        let (guard, key) = plan.open(|builder, set, receives| {
            let key = builder.build_in(set)?;
            post_receives_in(set, key, receives)?;
            Ok((key, key))
        })?;
        let address = guard.queue.with_set(|set| set.endpoint(key).map(|endpoint| endpoint.address()));
        Ok(Unconnected { guard, plan, address: address.ok_or(Error::Closed)? })
    }
}

impl<S: Sharing> Unconnected<S> {
    /// The address that the peer needs.
    #[must_use]
    pub fn address(&self) -> QueuePairAddress {
        self.address
    }

    /// Connects to the peer. Send only after the peer has connected as well.
    ///
    /// # Errors
    /// [`Error::Rdma`].
    pub fn connect(self, peer: &QueuePairAddress) -> Result<Connection<S>> {
        let Unconnected { mut guard, plan, .. } = self;
        let key = guard.key;
        guard.queue.with_set(|set| {
            let mut endpoint = set.endpoint(key).ok_or(rdma_safe::Error::NoSuchEndpoint)?;
            endpoint.connect(peer)
        })?;
        guard.is_done = true;
        Ok(plan.exchanged(&guard))
    }
}

impl<S: Sharing> fmt::Debug for Unconnected<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unconnected").field("address", &self.address).finish_non_exhaustive()
    }
}
