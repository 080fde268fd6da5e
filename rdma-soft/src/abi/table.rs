//! The device as the libibverbs of a program that links this crate.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::ptr::null_mut;

use rdma_sys::*;

use super::cm;

/// Makes the device the only one of this process, for `rdma_sys` and all that stands on it.
///
/// It comes with a librdmacm that refuses everything, with `EOPNOTSUPP`. Call it before the first verb.
///
/// # Errors
/// [`AlreadyLoaded`] when a libibverbs or a librdmacm is in use.
pub fn install() -> Result<(), AlreadyLoaded> {
    // A test looks at all that could be missing: it is known when the crate is compiled.
    let verbs = verbs_table().unwrap_or_else(|error| unreachable!("{error}"));
    // SAFETY: both tables hold functions that do what libibverbs and librdmacm document for them; to refuse is part of it.
    unsafe {
        install_verbs(verbs)?;
        install_rdmacm(cm::table())
    }
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
            // SAFETY: each name is looked up as the function of that name, and `signatures` has the compiler compare that
            // with the table.
            unsafe { Verbs::from_lookup("rdma-soft", find) }
        }

        /// Compiles if the functions have the types of the table, and all of them those of the list.
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
    fn the_device_has_all_functions_of_the_table() {
        let table = verbs_table().unwrap();
        // SAFETY: it takes any value and returns a string that stays.
        let text = unsafe { CStr::from_ptr((table.ibv_wc_status_str)(IBV_WC_RETRY_EXC_ERR)) };
        assert_eq!(text, c"transport retry counter exceeded");
    }
}
