//! Where a poll of several puts what it takes.

use super::EndpointKey;
use crate::endpoint::{Completion, DatagramSender, Succeeded};

/// Takes completed work from [`EndpointSet::poll_into`](crate::EndpointSet::poll_into).
///
/// The provider may hold a lock while these functions run. Store the work and return, and do not block.
pub trait CompletionSink {
    /// Takes a completion. It gets all work if the other functions are not implemented.
    ///
    /// Otherwise it gets the rest: work that has failed, messages with immediate data or an invalidated key, lists and datagrams.
    /// It also gets work of sets with a classic queue, timestamps or receive shares, and work that has waited in the set.
    ///
    /// `sender` is the sender of a datagram that was received.
    fn completed(&mut self, key: EndpointKey, completion: Completion, sender: Option<DatagramSender>);

    /// A send, write, read or atomic operation with one buffer has succeeded.
    #[inline(always)]
    fn sent(&mut self, key: EndpointKey, work: Succeeded) {
        self.completed(key, work.into(), None);
    }

    /// A message has arrived in one buffer, without immediate data and without an invalidated key.
    #[inline(always)]
    fn received(&mut self, key: EndpointKey, work: Succeeded) {
        self.completed(key, work.into(), None);
    }
}

impl<S: CompletionSink + ?Sized> CompletionSink for &mut S {
    #[inline(always)]
    fn completed(&mut self, key: EndpointKey, completion: Completion, sender: Option<DatagramSender>) {
        (**self).completed(key, completion, sender);
    }

    #[inline(always)]
    fn sent(&mut self, key: EndpointKey, work: Succeeded) {
        (**self).sent(key, work);
    }

    #[inline(always)]
    fn received(&mut self, key: EndpointKey, work: Succeeded) {
        (**self).received(key, work);
    }
}

/// Passes all completions to one function.
pub(super) struct Each<F>(pub(super) F);

impl<F: FnMut(EndpointKey, Completion, Option<DatagramSender>)> CompletionSink for Each<F> {
    #[inline(always)]
    fn completed(&mut self, key: EndpointKey, completion: Completion, sender: Option<DatagramSender>) {
        self.0(key, completion, sender);
    }
}
