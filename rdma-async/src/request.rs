//! What an operation does.

use std::marker::PhantomData;

use rdma_safe::endpoint::{EndpointMut, Rejected, Transfer};
use rdma_safe::{Buffer, Gather, RemoteMemory, Work, WorkId};

use crate::driver::state::Done;

/// What an [`Operation`](crate::Operation) does. Only types of this crate implement this trait.
pub trait Request: sealed::Sealed {
    /// The memory that the operation returns: a [`Buffer`] or a [`Gather`].
    type Memory;

    /// Posts the work. Its completion has `user_data`.
    #[doc(hidden)]
    fn post(self, endpoint: &mut EndpointMut<'_>, user_data: u32) -> Result<WorkId, Rejected>;

    /// Whether [`Request::into_transfer`] succeeds.
    #[doc(hidden)]
    const IS_TRANSFER: bool = false;

    /// What it transfers, if it is a plain transfer of one buffer.
    #[doc(hidden)]
    #[inline(always)]
    fn into_transfer(self) -> Result<(Transfer, Buffer), Self>
    where
        Self: Sized,
    {
        Err(self)
    }

    /// The memory of a request that is not posted.
    #[doc(hidden)]
    fn into_memory(self) -> (Option<Buffer>, Option<Gather>);

    /// The memory of completed work, unless it has failed.
    #[doc(hidden)]
    fn memory(done: Done) -> Result<Self::Memory, Done>;
}

mod sealed {
    pub trait Sealed {}
}

/// A send of one buffer.
#[derive(Debug)]
pub struct SendOne(pub(crate) Buffer);

/// A write of one buffer.
#[derive(Debug)]
pub struct WriteOne(pub(crate) Buffer, pub(crate) RemoteMemory);

/// A read into one buffer.
#[derive(Debug)]
pub struct ReadOne(pub(crate) Buffer, pub(crate) RemoteMemory);

/// Any other operation on one buffer.
#[derive(Debug)]
pub struct OneBuffer(pub(crate) Work<'static>);

/// An operation on a list of buffers.
#[derive(Debug)]
pub struct List(pub(crate) Work<'static>, pub(crate) PhantomData<Gather>);

/// A datagram.
#[derive(Debug)]
pub struct SendTo(pub(crate) Work<'static>, pub(crate) rdma_safe::Peer);

macro_rules! transfers {
    ($($name:ident, |$request:ident| $transfer:expr;)+) => {$(
        impl sealed::Sealed for $name {}

        impl Request for $name {
            type Memory = Buffer;
            const IS_TRANSFER: bool = true;

            #[inline(always)]
            fn post(self, endpoint: &mut EndpointMut<'_>, user_data: u32) -> Result<WorkId, Rejected> {
                let $request = self;
                endpoint.transfer($transfer, $request.0, user_data)
            }

            #[inline(always)]
            fn into_transfer(self) -> Result<(Transfer, Buffer), Self> {
                let $request = self;
                Ok(($transfer, $request.0))
            }

            fn into_memory(self) -> (Option<Buffer>, Option<Gather>) {
                (Some(self.0), None)
            }

            #[inline(always)]
            fn memory(done: Done) -> Result<Buffer, Done> {
                if let Done::Buffer(memory) = done { Ok(memory) } else { Err(done) }
            }
        }
    )+};
}

transfers! {
    SendOne, |request| Transfer::Send;
    WriteOne, |request| Transfer::Write(request.1);
    ReadOne, |request| Transfer::Read(request.1);
}

macro_rules! requests {
    ($($name:ty: $memory:ident, |$request:ident, $endpoint:ident, $user_data:ident| $post:expr, $into:expr;)+) => {$(
        impl sealed::Sealed for $name {}

        impl Request for $name {
            type Memory = $memory;

            #[inline(always)]
            fn post(self, $endpoint: &mut EndpointMut<'_>, $user_data: u32) -> Result<WorkId, Rejected> {
                let $request = self;
                $post
            }

            fn into_memory(self) -> (Option<Buffer>, Option<Gather>) {
                let $request = self;
                $into
            }

            #[inline(always)]
            fn memory(done: Done) -> Result<$memory, Done> {
                if let Done::$memory(memory) = done { Ok(memory) } else { Err(done) }
            }
        }
    )+};
}

requests! {
    OneBuffer: Buffer, |request, endpoint, user_data| endpoint.post(request.0.user_data(user_data)),
        request.0.into_memory();
    SendTo: Buffer, |request, endpoint, user_data| endpoint.post_to(request.0.user_data(user_data), &request.1),
        request.0.into_memory();
    List: Gather, |request, endpoint, user_data| endpoint.post(request.0.user_data(user_data)),
        request.0.into_memory();
}
