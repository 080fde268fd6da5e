//! Connections by address with endpoints in a set.

use super::attempt::Step;
use super::connection::DisconnectError;
use super::devices::require_device;
use super::side::{ConnectionEnd, Side};
use super::{Address, Id, PrivateData};
use crate::endpoint::EndpointMut;
use crate::{Buffer, EndpointBuilder, EndpointKey, EndpointSet, Error, Result};

/// A connection by address whose endpoint belongs to an [`EndpointSet`].
///
/// Made by [`Request::accept_in`](super::Request::accept_in) and [`Route::connect_in`](super::Route::connect_in). The
/// set owns the endpoint, lends it and polls it. This object holds the connection's id. Dropping it disconnects, but
/// leaves the endpoint in the set until [`EndpointSet::remove`]. Until then, messages from a peer that ignores the
/// disconnect can still arrive.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::collections::HashMap;
/// use std::time::Duration;
/// use rdma_safe::cm::Listener;
/// use rdma_safe::{Device, Endpoint, EndpointSet, ReceivePool};
///
/// let pd = Device::first()?.open()?.alloc_pd()?;
/// let mut pool = ReceivePool::new(&pd, 1024)?;
/// for buffer in pd.allocate(1024 * 256)?.into_chunks(256)? {
///     pool.receive(buffer)?;
/// }
/// let mut set = EndpointSet::builder(pd.context(), 1024 + 100 * 16).build()?;
/// let mut listener = Listener::bind("0.0.0.0:7471")?.pd(&pd);
/// let mut clients = HashMap::new();
/// loop {
///     if let Some(request) = listener.next(Duration::ZERO)? {
///         let builder = Endpoint::builder(&pd).send_depth(16).receive_pool(&pool);
///         match request.accept_in(builder, &mut set, b"") {
///             Ok(client) => drop(clients.insert(client.key(), client)),
///             Err(error) => eprintln!("{error}"),
///         }
///     }
///     while let Some((key, done)) = set.poll()? {
///         println!("{:?}: {:?}", clients[&key].peer_address(), done.status);
///     }
///     let mut ended = Vec::new();
///     for client in clients.values_mut() {
///         if !client.is_connected(&mut set)? {
///             ended.push(client.key());
///         }
///     }
///     for client in ended.iter().filter_map(|key| clients.remove(key)).collect::<Vec<_>>() {
///         client.disconnect(&mut set)?;
///     }
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct SetConnection {
    side: Side,
    key: EndpointKey,
    private_data: PrivateData,
}

impl SetConnection {
    /// Builds the endpoint and connects it with `handshake`.
    pub(super) fn new(
        mut side: Side,
        step: Step,
        builder: EndpointBuilder<'_>,
        set: &mut EndpointSet,
        handshake: impl FnOnce(&mut Side, &mut EndpointMut<'_>) -> Result<PrivateData>,
    ) -> Result<Self> {
        require_device(&side.id, builder.pd())?;
        let (builder, _) = side.configure(step, builder)?;
        let key = builder.build_in(set)?;
        let mut endpoint = set.endpoint(key).ok_or(Error::NoSuchEndpoint)?;
        match handshake(&mut side, &mut endpoint) {
            Ok(private_data) => Ok(SetConnection { side, key, private_data }),
            Err(error) => {
                let _ = set.remove(key);
                Err(error)
            }
        }
    }

    /// The key of the endpoint in the set.
    #[must_use]
    pub fn key(&self) -> EndpointKey {
        self.key
    }

    /// The private data of the peer's request or reply, padded with zeros.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The address of this end.
    #[must_use]
    pub fn local_address(&self) -> Option<Address> {
        self.side.id.local_address()
    }

    /// The address of the peer.
    #[must_use]
    pub fn peer_address(&self) -> Option<Address> {
        self.side.id.peer_address()
    }

    /// The id of the connection, see [`Connection::id`](super::Connection::id). [`SetConnection::is_connected`] reads its
    /// channel.
    #[must_use]
    pub fn id(&self) -> &Id {
        &self.side.id
    }

    /// Whether the connection exists: neither end has ended it. See [`Connection::is_connected`](super::Connection::is_connected).
    ///
    /// If the peer has ended it, `set` returns the work in flight as flushed. `set` must be the set of the endpoint.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    pub fn is_connected(&mut self, set: &mut EndpointSet) -> Result<bool> {
        self.side.is_connected(|| flush(set, self.key))
    }

    /// Ends the connection, and removes the endpoint from its set like [`EndpointSet::remove`].
    ///
    /// # Errors
    /// [`DisconnectError`], as with [`Connection::disconnect`](super::Connection::disconnect); the errors of
    /// [`EndpointSet::remove`].
    pub fn disconnect(mut self, set: &mut EndpointSet) -> Result<Vec<Buffer>, DisconnectError> {
        let disconnected = self.side.disconnect(|| flush(set, self.key));
        DisconnectError::combine(disconnected, set.remove(self.key))
    }
}

/// Flushes all work of an endpoint, if the set still contains it.
fn flush(set: &mut EndpointSet, key: EndpointKey) -> Result<()> {
    set.endpoint(key).map_or(Ok(()), |mut endpoint| endpoint.flush())
}
