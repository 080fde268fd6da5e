//! The call that failed, of an error that has one.

use crate::cm::CmError;
use crate::{AddressError, Errno, Error, HugePagesError, ModifyError, PollError, PostError};

impl Error {
    /// The `errno` behind it, if a call reported one.
    #[must_use]
    pub fn errno(&self) -> Option<Errno> {
        self.call().map(|(_, errno)| errno)
    }

    /// The verb, or other call, that failed, if one did.
    #[must_use]
    pub fn verb(&self) -> Option<&'static str> {
        self.call().map(|(verb, _)| verb)
    }

    /// Both.
    pub(crate) fn call(&self) -> Option<(&'static str, Errno)> {
        let (verb, errno) = match self {
            Error::DeviceList { errno } => ("ibv_get_device_list", errno),
            Error::Fork { errno } => ("ibv_fork_init", errno),
            Error::OpenDevice { errno, .. } => ("ibv_open_device", errno),
            Error::Verb { verb, errno, .. } => (*verb, errno),
            Error::AllocPd { errno } => ("ibv_alloc_pd", errno),
            Error::RegisterMemory { errno, .. } => ("ibv_reg_mr", errno),
            Error::RegisterDmaBuf { errno, .. } => ("ibv_reg_dmabuf_mr", errno),
            Error::AllocateDeviceMemory { errno, .. } => ("ibv_alloc_dm", errno),
            Error::MapHugePages(HugePagesError { errno, .. }) => ("mmap(2)", errno),
            Error::CreateChannel { errno } => ("ibv_create_comp_channel", errno),
            Error::Channel { call, errno } | Error::AsyncEvents { call, errno, .. } => (*call, errno),
            Error::CreateCompletionQueue { errno, .. } => ("ibv_create_cq", errno),
            Error::ResizeCompletionQueue { errno, .. } => ("ibv_resize_cq", errno),
            Error::ModerateCompletionQueue { errno, .. } => ("ibv_modify_cq", errno),
            Error::CreateQueuePair { errno, .. } => ("ibv_create_qp", errno),
            Error::CreateSharedReceiveQueue { errno, .. } => ("ibv_create_srq", errno),
            Error::ResizeSharedReceiveQueue { errno, .. } | Error::LimitSharedReceiveQueue { errno, .. } => {
                ("ibv_modify_srq", errno)
            }
            Error::Multicast { verb, errno, .. } => (*verb, errno),
            Error::Cm(CmError::Call { call, errno }) => (*call, errno),
            Error::Cm(CmError::Connect(error)) => (error.step.call(), error.cause.errno()?),
            Error::CreateWorkQueue { errno, .. } => ("ibv_create_wq", errno),
            Error::ModifyWorkQueue { errno, .. } => ("ibv_modify_wq", errno),
            Error::IndirectionTable { errno, .. } => ("ibv_create_rwq_ind_table", errno),
            Error::RxHash { errno, .. } => ("ibv_create_qp_ex", errno),
            Error::CreateFlow { errno, .. } => ("ibv_create_flow", errno),
            Error::Address(error) => ("ibv_create_ah", errno_of(error)?),
            Error::Modify(error) => match &**error {
                ModifyError::Refused { errno, .. } => ("ibv_modify_qp", errno),
                ModifyError::Address(error) => ("ibv_modify_qp", errno_of(error)?),
                _ => return None,
            },
            Error::Post(PostError::Refused { errno, .. } | PostError::InDoubt { errno }) => ("posting", errno),
            Error::Poll(PollError::Provider(errno)) => ("polling", errno),
            // Each by name, so that none is forgotten here that has an `errno`.
            Error::Load(_)
            | Error::NoDevice
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
            | Error::PolledHere { .. }
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
                | CmError::OlderLibrary { .. }
                | CmError::OtherDevice { .. }
                | CmError::OtherQueueKey { .. },
            )
            | Error::TooLate { .. }
            | Error::UnsupportedOperations { .. }
            | Error::Work(_)
            | Error::Timeout { .. }
            | Error::Unsupported { .. }
            | Error::Post(_)
            | Error::EndpointSetFull { .. }
            | Error::NoSuchEndpoint
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
    fn an_error_tells_the_call_that_failed_wherever_it_is_within_it() {
        let errno = Errno(libc::ETIMEDOUT);
        let source_gid = Gid::default();
        let unreachable = || AddressError::Unreachable { port: 1, index: 0, source_gid, dgid: source_gid, errno };
        for (error, verb) in [
            (Error::AllocateDeviceMemory { len: 1, align: 1, max: 0, errno }, "ibv_alloc_dm"),
            (Error::from(Box::new(unreachable())), "ibv_create_ah"),
            (Error::from(Box::new(ModifyError::from(unreachable()))), "ibv_modify_qp"),
        ] {
            assert_eq!((error.verb(), error.errno()), (Some(verb), Some(errno)), "{error}");
        }
        let port = Error::from(Box::new(AddressError::MissingGlobalRoute { port: 1 }));
        assert_eq!((port.verb(), port.errno()), (None, None));
    }
}
