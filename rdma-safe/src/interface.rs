//! The two interfaces of verbs, as type parameters.
//!
//! Needed only for loops that post or poll at the lowest cost. All other programs use the default, [`Any`].

/// The interface by which a [`SendQueue`](crate::post::SendQueue) posts or a [`Poller`](crate::cq::Poller) polls.
///
/// A queue has one of two interfaces for its lifetime. With [`Any`] each call checks which one. The methods
/// `with_interface` and `poller_with_interface` check once, and return a handle whose calls are compiled for one
/// interface only.
pub trait Interface: sealed::Interface {}

/// [`Extended`] or [`Classic`].
pub trait Known: Interface {}

/// The interface that the queue was created with, checked in each call.
#[derive(Clone, Copy, Debug)]
pub enum Any {}

/// The extended interface: `ibv_wr_*`, and `ibv_start_poll` and related functions.
#[derive(Clone, Copy, Debug)]
pub enum Extended {}

/// The classic interface: `ibv_post_send(3)` and `ibv_poll_cq(3)`.
#[derive(Clone, Copy, Debug)]
pub enum Classic {}

impl Interface for Any {}
impl Interface for Extended {}
impl Interface for Classic {}
impl Known for Extended {}
impl Known for Classic {}

pub(crate) mod sealed {
    /// Sealed: functions of the extended interface are called on the word of the implementation.
    pub trait Interface {
        /// Whether the interface is the extended one; `None` if each call checks.
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
