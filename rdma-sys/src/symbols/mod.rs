//! The exported functions of both libraries, as tables of function pointers.

mod rdmacm;
mod verbs;

pub use rdmacm::RdmaCm;
pub use verbs::Verbs;
