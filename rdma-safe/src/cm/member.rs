//! Connections by address whose endpoints belong to a set.

use super::attempt::Step;
use super::connection::Unconfirmed;
use super::devices::require;
use super::side::{End, Side};
use super::{Address, Id, PrivateData};
use crate::{Buffer, EndpointBuilder, EndpointKey, EndpointMut, EndpointSet, Error, Result};

/// A connection by address whose endpoint belongs to an [`EndpointSet`]. Made by [`Request::accept_in`](super::Request::accept_in)
/// and [`Route::connect_in`](super::Route::connect_in).
///
/// The set lends the endpoint, polls it and ends it; this is what is known of the peer. Dropping it tells the peer that the
/// connection has ended, and leaves the endpoint to [`EndpointSet::remove`]: until then work of a peer that does not heed it can
/// arrive there.
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
pub struct Member {
    side: Side,
    key: EndpointKey,
    private_data: PrivateData,
}

impl Member {
    /// Builds the endpoint, and lets `shake` connect it.
    pub(super) fn new(
        mut side: Side,
        step: Step,
        builder: EndpointBuilder<'_>,
        set: &mut EndpointSet,
        shake: impl FnOnce(&mut Side, &mut EndpointMut<'_>) -> Result<PrivateData>,
    ) -> Result<Self> {
        require(&side.id, builder.pd())?;
        let (builder, _) = side.placed(step, builder)?;
        let key = builder.build_in(set)?;
        let mut endpoint = set.endpoint(key).ok_or(Error::NoSuchEndpoint)?;
        match shake(&mut side, &mut endpoint) {
            Ok(private_data) => Ok(Member { side, key, private_data }),
            Err(error) => {
                let _ = set.remove(key);
                Err(error)
            }
        }
    }

    /// The name of its endpoint in the set.
    #[must_use]
    pub fn key(&self) -> EndpointKey {
        self.key
    }

    /// What the peer has said when it asked, or accepted; padded with zeros.
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

    /// The id behind it, as [`Connection::id`](super::Connection::id): its channel is read by [`Member::is_connected`].
    #[must_use]
    pub fn id(&self) -> &Id {
        &self.side.id
    }

    /// Whether neither end has ended the connection, as [`Connection::is_connected`](super::Connection::is_connected). If the peer
    /// has, work in flight comes back flushed from `set`, the one that the endpoint belongs to.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    pub fn is_connected(&mut self, set: &mut EndpointSet) -> Result<bool> {
        self.side.is_connected(|| flush(set, self.key))
    }

    /// Ends the connection, and removes the endpoint from its set, as [`EndpointSet::remove`] does.
    ///
    /// # Errors
    /// [`Unconfirmed`], as that of [`Connection::disconnect`](super::Connection::disconnect), with the errors of
    /// [`EndpointSet::remove`].
    pub fn disconnect(mut self, set: &mut EndpointSet) -> Result<Vec<Buffer>, Unconfirmed> {
        let told = self.side.part(|| flush(set, self.key));
        Unconfirmed::unless(told, set.remove(self.key))
    }
}

/// The work of an endpoint comes back, if the set still has it.
fn flush(set: &mut EndpointSet, key: EndpointKey) -> Result<()> {
    set.endpoint(key).map_or(Ok(()), |mut endpoint| endpoint.flush())
}
