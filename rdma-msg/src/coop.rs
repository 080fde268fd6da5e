//! Tasks of tokio let other tasks run, also if their operations never have to wait: [`tokio::task::coop`].

#[cfg(feature = "tokio")]
pub(crate) use ::tokio::task::coop::poll_proceed;

#[cfg(not(feature = "tokio"))]
pub(crate) use without::poll_proceed;

#[cfg(not(feature = "tokio"))]
mod without {
    use std::task::{Context, Poll};

    /// Other runtimes have no budget for tasks.
    pub(crate) struct Unlimited;

    impl Unlimited {
        #[inline(always)]
        pub(crate) fn made_progress(&self) {}
    }

    #[inline(always)]
    pub(crate) fn poll_proceed(_: &mut Context<'_>) -> Poll<Unlimited> {
        Poll::Ready(Unlimited)
    }
}
