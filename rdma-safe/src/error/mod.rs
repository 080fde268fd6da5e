//! Errors of the control path, with advice on what to change.
//!
//! Calls return [`Error`], except that posting returns [`PostError`](crate::PostError) and polling
//! [`PollError`](crate::PollError).

mod call;
mod huge_pages;
mod limits;
mod missing;
mod variants;
mod verb;

pub use crate::errno::Errno;
pub use huge_pages::{HugePagesError, PagesError};
pub(crate) use missing::use_soft0;
pub use variants::Error;
pub(crate) use verb::Family;
pub use verb::Verb;

/// The result of a control-path operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;
