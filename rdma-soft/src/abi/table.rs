//! Installing the device as the libibverbs of a program that links this crate.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::ptr::null_mut;
use std::sync::OnceLock;

use rdma_sys::*;

use super::cm;

/// Makes soft0 the only RDMA device of this process.
///
/// All users of `rdma_sys` then call this crate instead of libibverbs and librdmacm. rsockets fail with `EOPNOTSUPP`. Call it
/// before the first verb.
///
/// # Errors
/// [`AlreadyLoaded`] if libibverbs or librdmacm is already in use.
pub fn install() -> Result<(), AlreadyLoaded> {
    // The sets of functions are fixed at compile time, and a test checks that none is missing.
    let (mut verbs, cm) = match (verbs_table(), cm::table()) {
        (Ok(verbs), Ok(cm)) => (verbs, cm),
        (Err(error), _) | (_, Err(error)) => unreachable!("{error}"),
    };
    if let Some(replace) = INTERPOSER.get() {
        replace(&mut verbs);
    }
    // SAFETY: the functions of both tables behave as libibverbs and librdmacm document, which includes failing.
    unsafe {
        install_verbs(verbs)?;
        install_rdmacm(cm)
    }
}

/// The function of [`interpose`].
static INTERPOSER: OnceLock<fn(&mut Verbs)> = OnceLock::new();

/// Makes [`install`] pass the table of verbs to `replace` before installing it.
///
/// Tests put their own functions into the table. These call soft0, and make it fail or report wrong completions. Only the first
/// call has an effect, and only if it precedes [`install`].
///
/// # Safety
/// The functions that `replace` assigns keep the contract of their verbs towards the caller: they may fail and they may report
/// anything, but the objects that they return are objects of soft0, and they access no other memory than soft0 does.
#[doc(hidden)]
pub unsafe fn interpose(replace: fn(&mut Verbs)) {
    // A second call comes from a program with two interposers, of which the first stays.
    _ = INTERPOSER.set(replace);
}

macro_rules! define {
    (
        public { $(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?;)* }
        private { $(fn $private:ident($($private_arg:ident: $private_ty:ty),* $(,)?) $(-> $private_ret:ty)?;)* }
    ) => {
        fn verbs_table() -> Result<Verbs, LoadError> {
            let find = |name: &CStr| match name.to_bytes() {
                $(name if name == stringify!($name).as_bytes() => super::$name as *mut c_void,)*
                _ => null_mut(),
            };
            // SAFETY: each name yields the function of that name, and the compiler checks the types in `signatures`.
            unsafe { Verbs::from_lookup("rdma-soft", find) }
        }

        /// Compiles only if the functions have the types of the table and of the list.
        const _: () = {
            fn signatures(table: &mut Verbs) {
                $(table.$name = super::$name;)*
                $(let _: unsafe extern "C" fn($($ty),*) $(-> $ret)? = super::$name;)*
                $(let _: unsafe extern "C" fn($($private_ty),*) $(-> $private_ret)? = super::$private;)*
            }
            _ = signatures as fn(&mut Verbs);
        };
    };
}

crate::for_each_function!(define);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_of_the_table_exists() {
        cm::table().unwrap();
        let table = verbs_table().unwrap();
        // SAFETY: the function takes any value, and returns a string that is never freed.
        let text = unsafe { CStr::from_ptr((table.ibv_wc_status_str)(IBV_WC_RETRY_EXC_ERR)) };
        assert_eq!(text, c"transport retry counter exceeded");
    }
}
