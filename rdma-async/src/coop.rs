//! Makes tasks yield to tokio's scheduler even if their operations are always ready: [`tokio::task::coop`]. For the crates above.

#[cfg(feature = "tokio")]
pub use ::tokio::task::coop::poll_proceed;

#[cfg(not(feature = "tokio"))]
pub use without::poll_proceed;

#[cfg(not(feature = "tokio"))]
mod without {
    use std::task::{Context, Poll};

    /// Other runtimes have no budget for tasks.
    #[derive(Debug)]
    pub struct Unlimited;

    impl Unlimited {
        #[inline(always)]
        pub fn made_progress(&self) {}
    }

    #[inline(always)]
    pub fn poll_proceed(_: &mut Context<'_>) -> Poll<Unlimited> {
        Poll::Ready(Unlimited)
    }
}
