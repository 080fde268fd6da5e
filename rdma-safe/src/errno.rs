//! Error numbers, and the conventions by which verbs report errors.

use std::fmt;
use std::io;

/// An `errno` value that a verb reported.
///
/// Zero means that the provider failed without a reason: rdma-core does not set `errno` on every path.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Errno(pub i32);

impl Errno {
    /// The calling thread's `errno`.
    pub(crate) fn last() -> Self {
        Errno(io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }

    /// Whether the device, provider or library lacks the operation.
    #[must_use]
    pub fn is_unsupported(self) -> bool {
        matches!(self.0, libc::EOPNOTSUPP | libc::ENOSYS)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("the provider gave no reason (errno 0)"),
            errno => write!(f, "{}", io::Error::from_raw_os_error(errno)),
        }
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Errno({}: {self})", self.0)
    }
}

impl std::error::Error for Errno {}

impl From<Errno> for io::Error {
    fn from(errno: Errno) -> Self {
        match errno.0 {
            // The OS error 0 would print as "Success".
            0 => io::Error::other(errno),
            errno => io::Error::from_raw_os_error(errno),
        }
    }
}

/// Result of verbs that return 0 or a positive `errno` (`ibv_modify_qp`, `ibv_destroy_*`, …).
///
/// A few providers return -1 and set `errno` instead.
#[inline]
pub(crate) fn check(result: i32) -> Result<(), Errno> {
    match result {
        0 => Ok(()),
        positive if positive > 0 => Err(Errno(positive)),
        _ => Err(Errno::last()),
    }
}

/// Result of verbs that return NULL and set `errno` (`ibv_create_*`, `ibv_alloc_*`, `ibv_reg_*`, `ibv_open_*`).
///
/// `errno` is cleared before `call`, because rdma-core does not set it on some failures, and a stale value would
/// mislead.
#[inline(always)]
pub(crate) fn check_ptr<T>(call: impl FnOnce() -> *mut T) -> Result<std::ptr::NonNull<T>, Errno> {
    clear();
    std::ptr::NonNull::new(call()).ok_or_else(Errno::last)
}

/// Result of verbs that return -1 and set `errno` (`ibv_query_gid`, `ibv_query_pkey`, `ibv_get_cq_event`).
pub(crate) fn check_neg(call: impl FnOnce() -> i32) -> Result<i32, Errno> {
    clear();
    match call() {
        result if result >= 0 => Ok(result),
        _ => Err(Errno::last()),
    }
}

/// Result of verbs that return 0, a negated `errno`, or -1 with `errno` set (`ibv_resolve_eth_l2_from_gid`).
///
/// If a call returns -1 and does not set `errno`, the cause is unknown: -1 is also the negated `EPERM`.
pub(crate) fn check_negated(call: impl FnOnce() -> i32) -> Result<(), Errno> {
    clear();
    match call() {
        0.. => Ok(()),
        -1 => Err(Errno::last()),
        negated => Err(Errno(negated.saturating_neg())),
    }
}

/// Why a name could not be resolved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NameError {
    /// A call failed.
    Errno(Errno),
    /// An error code of getaddrinfo(3).
    Code(i32),
}

impl NameError {
    /// Converts the `errno` that `rdma_resolve_addrinfo` leaves. The function stores the return value of the failed
    /// call there.
    pub(crate) fn from_errno(errno: Errno) -> Self {
        match errno.0 {
            0.. => NameError::Errno(errno),
            // The return value has overwritten the reason.
            -1 | libc::EAI_SYSTEM => NameError::Errno(Errno(0)),
            code => NameError::Code(code),
        }
    }
}

/// Result of `rdma_getaddrinfo`, which returns -1 and sets `errno`, or returns a code of getaddrinfo(3).
///
/// The code -1 is EAI_BADFLAGS; `rdma_getaddrinfo` sets no flags that cause it.
pub(crate) fn check_name(call: impl FnOnce() -> i32) -> Result<(), NameError> {
    clear();
    match call() {
        0 => Ok(()),
        -1 | libc::EAI_SYSTEM => Err(NameError::Errno(Errno::last())),
        code => Err(NameError::Code(code)),
    }
}

#[inline]
fn clear() {
    // SAFETY: `__errno_location` returns a valid pointer to the calling thread's errno and cannot fail.
    unsafe { *libc::__errno_location() = 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_convention_yields_the_errno_of_its_own_family() {
        assert_eq!(check(0), Ok(()));
        assert_eq!(check(libc::EBUSY), Err(Errno(libc::EBUSY)));
        assert_eq!(check_neg(|| 3), Ok(3));
        assert_eq!(check_ptr::<u8>(std::ptr::null_mut), Err(Errno(0)), "a stale errno is not reported");
        let minus_one = || {
            // SAFETY: as in `clear`.
            unsafe { *libc::__errno_location() = libc::EINVAL };
            -1
        };
        assert_eq!(check_neg(minus_one), Err(Errno(libc::EINVAL)));
        assert_eq!(check(minus_one()), Err(Errno(libc::EINVAL)), "-1 is never shown as an errno");
        assert_eq!(check_negated(|| 0), Ok(()));
        assert_eq!(check_negated(minus_one), Err(Errno(libc::EINVAL)));
        assert_eq!(check_negated(|| -libc::EHOSTUNREACH), Err(Errno(libc::EHOSTUNREACH)));
        assert_eq!(check_negated(|| i32::MIN), Err(Errno(i32::MAX)));
        assert_eq!(check_negated(|| -1), Err(Errno(0)), "a stale errno is not reported");
        assert_eq!(check_name(|| 0), Ok(()));
        assert_eq!(check_name(minus_one), Err(NameError::Errno(Errno(libc::EINVAL))));
        assert_eq!(check_name(|| libc::EAI_NONAME), Err(NameError::Code(libc::EAI_NONAME)));
        assert_eq!(check_name(|| libc::EAI_SYSTEM), Err(NameError::Errno(Errno(0))), "a stale errno is not reported");
        assert_eq!(NameError::from_errno(Errno(libc::EBUSY)), NameError::Errno(Errno(libc::EBUSY)));
        assert_eq!(NameError::from_errno(Errno(libc::EAI_NONAME)), NameError::Code(libc::EAI_NONAME));
        assert_eq!(NameError::from_errno(Errno(-1)), NameError::Errno(Errno(0)), "-1 is never shown as an errno");
    }

    #[test]
    fn an_unknown_reason_is_never_shown_as_success() {
        assert_eq!(Errno(0).to_string(), "the provider gave no reason (errno 0)");
        assert!(Errno(libc::EINVAL).to_string().contains("Invalid argument"));
        assert_eq!(io::Error::from(Errno(0)).to_string(), Errno(0).to_string());
        assert_eq!(io::Error::from(Errno(libc::EINVAL)).raw_os_error(), Some(libc::EINVAL));
    }
}
