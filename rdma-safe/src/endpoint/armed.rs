//! The result of arming a completion queue.

/// What to do after arming: wait for the channel, or poll again.
///
/// Returned by [`Endpoint::arm`](crate::Endpoint::arm), [`DatagramEndpoint::arm`](crate::DatagramEndpoint::arm) and
/// [`EndpointSet::arm`](crate::EndpointSet::arm). Completions that precede arming may raise no event. A service that
/// waits for one anyway may hang.
///
/// Arming first takes all pending events from the channel, so no loop has to read them:
///
/// ```no_run
/// # fn readable(_: std::os::fd::BorrowedFd<'_>) {}
/// # fn serve(_: rdma_safe::Completion) {}
/// # fn example(pd: &rdma_safe::ProtectionDomain) -> Result<(), Box<dyn std::error::Error>> {
/// use std::os::fd::AsFd;
/// use rdma_safe::Endpoint;
/// use rdma_safe::endpoint::Armed;
///
/// let mut endpoint = Endpoint::builder(pd).events(true).build()?;
/// // … connect it and post receives
/// loop {
///     while let Some(done) = endpoint.poll()? {
///         serve(done);
///     }
///     match endpoint.arm()? {
///         Armed::Poll => continue,
///         // Sleep until the channel can be read: poll(2), epoll(7), the reactor of a runtime.
///         Armed::Wait => readable(endpoint.channel().unwrap().as_fd()),
///     }
/// }
/// # }
/// ```
/// With a keepalive ([`EndpointBuilder::keepalive`](crate::EndpointBuilder::keepalive)), sleep until
/// [`Endpoint::keepalive_due`](crate::Endpoint::keepalive_due) at the longest.
///
/// Without a reactor, [`CompletionChannel::wait`](crate::CompletionChannel::wait) sleeps with a deadline. With tokio,
/// make one `AsyncFd` of a clone of the channel; the last arm is then `Armed::Wait =>
/// fd.readable().await?.clear_ready()`. Without `clear_ready` the loop spins silently.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[must_use = "completions that came before arming raise no event: `Armed::Poll` says to poll again, and not to wait"]
pub enum Armed {
    /// No completion is available. The next one raises an event, so wait until the channel is readable.
    Wait,
    /// Completions are available. Poll until there are none, and arm again before waiting.
    Poll,
}

impl Armed {
    pub(super) fn with(has_completions: bool) -> Self {
        if has_completions { Armed::Poll } else { Armed::Wait }
    }
}
