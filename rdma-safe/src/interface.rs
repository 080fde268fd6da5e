//! Which of the two interfaces of verbs an object was created with, where the compiler shall know.

/// The interface that a [`SendQueue`](crate::SendQueue) posts or a [`Poller`](crate::Poller) polls by.
///
/// A queue is of one of two for as long as it lives. [`Any`] asks it on every call; who has asked once, by `extended()` or
/// `classic()`, has a handle that knows, and whose calls are compiled without the other interface.
pub trait Interface: sealed::Interface {}

/// [`Extended`] or [`Classic`].
pub trait Known: Interface {}

/// The one that the queue was created with, to be asked for on every call.
#[derive(Clone, Copy, Debug)]
pub enum Any {}

/// `ibv_wr_*`, and `ibv_start_poll` and its like.
#[derive(Clone, Copy, Debug)]
pub enum Extended {}

/// `ibv_post_send(3)` and `ibv_poll_cq(3)`.
#[derive(Clone, Copy, Debug)]
pub enum Classic {}

impl Interface for Any {}
impl Interface for Extended {}
impl Interface for Classic {}
impl Known for Extended {}
impl Known for Classic {}

pub(crate) mod sealed {
    /// Not implementable elsewhere: functions of the extended interface are called on its word.
    pub trait Interface {
        /// `None` where the queue has to be asked.
        const EXTENDED: Option<bool>;
    }
}

impl sealed::Interface for Any {
    const EXTENDED: Option<bool> = None;
}

impl sealed::Interface for Extended {
    const EXTENDED: Option<bool> = Some(true);
}

impl sealed::Interface for Classic {
    const EXTENDED: Option<bool> = Some(false);
}
