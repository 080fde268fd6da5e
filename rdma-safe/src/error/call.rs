//! The call behind an error.

use crate::address::AddressError;
use crate::cm::CmError;
use crate::error::{HugePagesError, PagesError, Verb};
use crate::mr::ReclaimReason;
use crate::qp::ModifyError;
use crate::{Errno, Error, PollError, PostError};

impl Error {
    /// The `errno` of the call that failed, if there is one.
    #[must_use]
    pub fn errno(&self) -> Option<Errno> {
        self.call().map(|(_, errno)| errno)
    }

    /// The function that failed, if there is one.
    #[must_use]
    pub fn verb(&self) -> Option<Verb> {
        self.call().map(|(verb, _)| verb)
    }

    /// The function that failed and its `errno`.
    pub(crate) fn call(&self) -> Option<(Verb, Errno)> {
        let (verb, errno) = match self {
            Error::DeviceList { errno } => (Verb::GetDeviceList, errno),
            Error::Fork { errno } => (Verb::ForkInit, errno),
            Error::OpenDevice { errno, .. } => (Verb::OpenDevice, errno),
            Error::Verb { verb, errno, .. } => (*verb, errno),
            Error::AllocPd { errno } => (Verb::AllocPd, errno),
            Error::RegisterMemory { errno, .. } => (Verb::RegMr, errno),
            Error::RegisterDmaBuf { errno, .. } => (Verb::RegDmabufMr, errno),
            Error::AllocateDeviceMemory { errno, .. } => (Verb::AllocDm, errno),
            Error::MapHugePages(HugePagesError { errno, .. }) => (Verb::Mmap, errno),
            Error::Pages(PagesError::Transparent { errno, .. }) => (Verb::Madvise, errno),
            Error::Pages(PagesError::Node { errno, .. }) => (Verb::Mbind, errno),
            Error::Pages(PagesError::Never { .. }) => return None,
            Error::CreateChannel { errno } => (Verb::CreateCompChannel, errno),
            Error::Channel { verb, errno } | Error::AsyncEvents { verb, errno, .. } => (*verb, errno),
            Error::CreateCompletionQueue { errno, .. } => (Verb::CreateCq, errno),
            Error::ResizeCompletionQueue { errno, .. } => (Verb::ResizeCq, errno),
            Error::ModerateCompletionQueue { errno, .. } => (Verb::ModifyCq, errno),
            Error::CreateQueuePair { errno, .. } => (Verb::CreateQp, errno),
            Error::CreateSharedReceiveQueue { errno, .. } => (Verb::CreateSrq, errno),
            Error::ResizeSharedReceiveQueue { errno, .. } | Error::LimitSharedReceiveQueue { errno, .. } => {
                (Verb::ModifySrq, errno)
            }
            Error::Multicast { verb, errno, .. } => (*verb, errno),
            Error::Cm(CmError::Call { verb, errno }) => (*verb, errno),
            Error::Cm(CmError::Connect(error)) => (error.step.verb(), error.cause.errno()?),
            Error::CreateWorkQueue { errno, .. } => (Verb::CreateWq, errno),
            Error::ModifyWorkQueue { errno, .. } => (Verb::ModifyWq, errno),
            Error::IndirectionTable { errno, .. } => (Verb::CreateRwqIndTable, errno),
            Error::RxHash { errno, .. } => (Verb::CreateQpEx, errno),
            Error::CreateFlow { errno, .. } => (Verb::CreateFlow, errno),
            Error::Reclaim(ReclaimReason::Deregister { errno }) => (Verb::DeregMr, errno),
            Error::Reclaim(_) => return None,
            Error::Address(error) => (Verb::CreateAh, errno_of(error)?),
            Error::Modify(error) => match &**error {
                ModifyError::Refused { errno, .. } => (Verb::ModifyQp, errno),
                ModifyError::Address(error) => (Verb::ModifyQp, errno_of(error)?),
                _ => return None,
            },
            Error::Post(PostError::Refused { errno, .. } | PostError::MaybePosted { errno }) => (Verb::Posting, errno),
            Error::Poll(PollError::Provider(errno)) => (Verb::Polling, errno),
            // Lists all variants, so that a new variant with an `errno` cannot be forgotten here.
            Error::Load(_)
            | Error::NoDevice
            | Error::Inherited { .. }
            | Error::DeviceNotFound { .. }
            | Error::NoSuchPort { .. }
            | Error::NoSuchGid { .. }
            | Error::NoGid { .. }
            | Error::Allocate { .. }
            | Error::EmptyRegion
            | Error::BufferAccess { .. }
            | Error::NotBindable { .. }
            | Error::PartSize { .. }
            | Error::OutOfBounds { .. }
            | Error::Misaligned { .. }
            | Error::CompletionFields { .. }
            | Error::ForeignMemory
            | Error::NotParentDomain
            | Error::ForeignContext { .. }
            | Error::WrongParent { .. }
            | Error::PollInProgress { .. }
            | Error::NoChannel
            | Error::NotInitialised
            | Error::InUse { .. }
            | Error::WrongType { .. }
            | Error::NotMulticast { .. }
            | Error::NoGrh
            | Error::MissingFields { .. }
            | Error::TagList { .. }
            | Error::Cm(
                CmError::PrivateData { .. }
                | CmError::NoAddress { .. }
                | CmError::FailedLeave { .. }
                | CmError::OlderLibrary { .. }
                | CmError::OtherDevice { .. }
                | CmError::OtherQueueKey { .. },
            )
            | Error::WrongState { .. }
            | Error::UnsupportedOperations { .. }
            | Error::Work(_)
            | Error::ConnectionLost(_)
            | Error::Keepalive(_)
            | Error::Timeout { .. }
            | Error::Unsupported { .. }
            | Error::Post(_)
            | Error::EndpointSetFull { .. }
            | Error::NoSuchEndpoint
            | Error::Join(_)
            | Error::Poll(_) => return None,
        };
        Some((verb, *errno))
    }
}

fn errno_of(error: &AddressError) -> Option<&Errno> {
    match error {
        AddressError::Unreachable { errno, .. } | AddressError::Refused { errno, .. } => Some(errno),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Gid;

    #[test]
    fn nested_errors_report_verb_and_errno() {
        let errno = Errno(libc::ETIMEDOUT);
        let source_gid = Gid::default();
        let unreachable = || AddressError::Unreachable { port: 1, index: 0, source_gid, dgid: source_gid, errno };
        for (error, verb) in [
            (Error::AllocateDeviceMemory { len: 1, align: 1, max: 0, errno }, Verb::AllocDm),
            (Error::from(Box::new(unreachable())), Verb::CreateAh),
            (Error::from(Box::new(ModifyError::from(unreachable()))), Verb::ModifyQp),
        ] {
            assert_eq!((error.verb(), error.errno()), (Some(verb), Some(errno)), "{error}");
        }
        let port = Error::from(Box::new(AddressError::MissingGlobalRoute { port: 1 }));
        assert_eq!((port.verb(), port.errno()), (None, None));
    }
}
