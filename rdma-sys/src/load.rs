//! Loading libibverbs and librdmacm at run time.

use core::ffi::{CStr, c_void};
use core::mem::transmute_copy;
use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::{RdmaCm, Verbs};

static VERBS: OnceLock<Result<Verbs, LoadError>> = OnceLock::new();
static RDMACM: OnceLock<Result<RdmaCm, LoadError>> = OnceLock::new();

const IBVERBS: &str = "libibverbs.so.1";
const LIBRDMACM: &str = "librdmacm.so.1";

/// Returns the table of libibverbs, which is loaded in the first call. Later calls return the same table or error.
///
/// This loads `libibverbs.so.1` from the dynamic linker's search path. If `RDMA_SYS_LIBIBVERBS` names another library,
/// only that one is tried. [`install_verbs`] replaces both. The library stays loaded until the process ends: providers
/// register themselves in it, and all its objects hold pointers to its code.
///
/// # Errors
/// [`LoadError`], which says what was tried and how to fix it.
#[inline]
pub fn verbs() -> Result<&'static Verbs, &'static LoadError> {
    match VERBS.get() {
        Some(loaded) => loaded.as_ref(),
        None => load_verbs(),
    }
}

#[cold]
fn load_verbs() -> Result<&'static Verbs, &'static LoadError> {
    // SAFETY: libibverbs.so.1 is the SONAME of the ABI that the table describes. A user who sets the variable vouches
    // for the library, as with LD_PRELOAD.
    let load = || unsafe { Verbs::load_from(library_name(IBVERBS, "RDMA_SYS_LIBIBVERBS")) };
    VERBS.get_or_init(load).as_ref()
}

/// Returns the table of librdmacm, which is loaded in the first call. Later calls return the same table or error.
///
/// This loads `librdmacm.so.1` from the dynamic linker's search path. If `RDMA_SYS_LIBRDMACM` names another library,
/// only that one is tried. [`install_rdmacm`] replaces both. libibverbs is loaded first, so that librdmacm uses the
/// same copy as [`verbs`], provided that its SONAME is `libibverbs.so.1`.
///
/// # Errors
/// [`LoadError`], which says what was tried and how to fix it.
pub fn rdmacm() -> Result<&'static RdmaCm, &'static LoadError> {
    let load = || {
        // librdmacm depends on libibverbs and would load the default one. An error here is ignored: without libibverbs,
        // loading librdmacm fails with its own error, and the librdmacm of another provider may not need libibverbs.
        _ = verbs();
        // SAFETY: as in `verbs`, for librdmacm.so.1.
        unsafe { RdmaCm::load_from(library_name(LIBRDMACM, "RDMA_SYS_LIBRDMACM")) }
    };
    RDMACM.get_or_init(load).as_ref()
}

fn library_name(default: &str, variable: &str) -> OsString {
    // SAFETY: this reads a value that the kernel passed to the process at its start.
    let is_privileged = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    // The user of a set-user-ID program must not choose its libraries, as with LD_PRELOAD.
    let chosen = if is_privileged { None } else { std::env::var_os(variable) };
    chosen.unwrap_or_else(|| default.into())
}

/// Makes [`verbs`] return `table`, for a provider that is linked into the program.
///
/// A provider with its own connection manager must install both tables, because the system's librdmacm would return
/// contexts of the system's libibverbs.
///
/// # Errors
/// [`AlreadyLoaded`] if [`verbs`] was called before, even if loading failed.
///
/// # Safety
/// Each function must have the signature and behavior that rdma-core documents for its name.
pub unsafe fn install_verbs(table: Verbs) -> Result<(), AlreadyLoaded> {
    VERBS.set(Ok(table)).map_err(|_| AlreadyLoaded { library: IBVERBS })
}

/// Makes [`rdmacm`] return `table`, for a connection manager that is linked into the program.
///
/// # Errors
/// [`AlreadyLoaded`] if [`rdmacm`] was called before, even if loading failed.
///
/// # Safety
/// Those of [`install_verbs`].
pub unsafe fn install_rdmacm(table: RdmaCm) -> Result<(), AlreadyLoaded> {
    RDMACM.set(Ok(table)).map_err(|_| AlreadyLoaded { library: LIBRDMACM })
}

impl Verbs {
    /// Loads a library by name or path into a separate table. It does not affect [`verbs`], and is never unloaded.
    ///
    /// # Errors
    /// [`LoadError::Library`] if it cannot be loaded; [`LoadError::Symbol`] if it lacks a function of rdma-core 44.
    ///
    /// # Safety
    /// Loading runs the library's initializers. Its exports with names of libibverbs must be those functions.
    pub unsafe fn load_from(library: impl AsRef<OsStr>) -> Result<Self, LoadError> {
        // SAFETY: the caller vouches for the library.
        unsafe { load(IBVERBS, library.as_ref(), Self::resolve) }
    }

    /// Builds the table with `find`, which returns the address of a symbol, or null if it does not exist.
    ///
    /// `library` is a name for error messages. This is how a provider that is linked into the program builds the table
    /// for [`install_verbs`]. Later releases of this crate look up more names, all of them optional, so such a provider
    /// still compiles.
    ///
    /// ```no_run
    /// use std::ffi::{CStr, c_int, c_void};
    ///
    /// use rdma_sys::{Verbs, ibv_context};
    ///
    /// unsafe extern "C" fn close_device(_: *mut ibv_context) -> c_int {
    ///     0
    /// }
    ///
    /// fn find(name: &CStr) -> *mut c_void {
    ///     match name.to_bytes() {
    ///         b"ibv_close_device" => close_device as *mut c_void,
    ///         // … the other functions
    ///         _ => std::ptr::null_mut(),
    ///     }
    /// }
    ///
    /// // SAFETY: each name yields the function of that name.
    /// let mut table = unsafe { Verbs::from_lookup("my provider", find) }?;
    /// // Fields can be assigned as well, with a check of the type:
    /// table.ibv_close_device = close_device;
    /// // SAFETY: the functions behave as libibverbs documents.
    /// unsafe { rdma_sys::install_verbs(table) }?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`LoadError::Symbol`] if `find` returns null for a function of rdma-core 44.
    ///
    /// # Safety
    /// `find` must return null or a function with the signature and behavior that rdma-core documents for that name.
    /// The function must stay loaded.
    pub unsafe fn from_lookup(library: &str, mut find: impl FnMut(&CStr) -> *mut c_void) -> Result<Self, LoadError> {
        // SAFETY: the caller vouches for `find`.
        unsafe { Self::resolve(&mut Lookup { library, find: &mut find }) }
    }
}

impl RdmaCm {
    /// Loads a library by name or path into a separate table. It does not affect [`rdmacm`], and is never unloaded.
    ///
    /// # Errors
    /// [`LoadError::Library`] if it cannot be loaded; [`LoadError::Symbol`] if it lacks a function of rdma-core 44.
    ///
    /// # Safety
    /// Loading runs the library's initializers. Its exports with names of librdmacm must be those functions.
    pub unsafe fn load_from(library: impl AsRef<OsStr>) -> Result<Self, LoadError> {
        // SAFETY: the caller vouches for the library.
        unsafe { load(LIBRDMACM, library.as_ref(), Self::resolve) }
    }

    /// Builds the table with `find`, which returns the addresses of symbols; see [`Verbs::from_lookup`].
    ///
    /// # Errors
    /// [`LoadError::Symbol`] if `find` returns null for a function of rdma-core 44.
    ///
    /// # Safety
    /// Those of [`Verbs::from_lookup`].
    pub unsafe fn from_lookup(library: &str, mut find: impl FnMut(&CStr) -> *mut c_void) -> Result<Self, LoadError> {
        // SAFETY: the caller vouches for `find`.
        unsafe { Self::resolve(&mut Lookup { library, find: &mut find }) }
    }
}

/// # Safety
/// Those of [`Verbs::load_from`].
unsafe fn load<T>(
    soname: &'static str,
    name: &OsStr,
    resolve: unsafe fn(&mut Lookup<'_>) -> Result<T, LoadError>,
) -> Result<T, LoadError> {
    // RTLD_NOW: an incomplete installation fails here with an error, instead of aborting the process in the first call.
    // RTLD_LOCAL: librdmacm exports common names such as `rread` and `rpoll`, which must not replace functions of other
    // libraries. Providers find libibverbs through their own dependency on it, not through the global scope.
    // SAFETY: the caller vouches for the library's initializers.
    let handle = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| LoadError::Library {
        library: soname,
        tried: vec![name.to_string_lossy().into_owned()],
        source: Box::new(error),
    })?;
    let mut find = |symbol: &CStr| {
        // dlsym returns the default version of a symbol, which is the one that the table describes. Older versions of
        // the same name have other structure layouts.
        // SAFETY: only the address of the symbol is used.
        let found = unsafe { handle.get::<*mut c_void>(symbol.to_bytes_with_nul()) };
        found.map_or(core::ptr::null_mut(), |symbol| symbol.as_raw_ptr())
    };
    // SAFETY: the caller vouches for the library's functions. They stay loaded: after an error the handle is closed and
    // no pointer is left, and after success the handle is leaked below.
    let table = unsafe { resolve(&mut Lookup { library: &name.to_string_lossy(), find: &mut find }) }?;
    // The library is never closed.
    _ = handle.into_raw();
    Ok(table)
}

/// The source of a table's functions.
pub(crate) struct Lookup<'a> {
    library: &'a str,
    find: &'a mut dyn FnMut(&CStr) -> *mut c_void,
}

impl Lookup<'_> {
    /// # Safety
    /// `F` must be the function pointer type of the function with that name.
    pub(crate) unsafe fn required<F: Copy>(&mut self, name: &'static CStr, since: u32) -> Result<F, LoadError> {
        // SAFETY: the caller vouches for `F`.
        unsafe { self.optional(name) }.ok_or_else(|| LoadError::Symbol {
            library: self.library.to_owned(),
            name: name.to_str().unwrap_or_default(),
            since,
        })
    }

    /// # Safety
    /// Those of [`required`](Self::required).
    pub(crate) unsafe fn optional<F: Copy>(&mut self, name: &'static CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let address = (self.find)(name);
        // SAFETY: the address is not null, and `F` is the type of a pointer to the function. Both have the same size.
        (!address.is_null()).then(|| unsafe { transmute_copy::<*mut c_void, F>(&address) })
    }
}

/// Why a library cannot be used.
#[derive(Debug)]
#[non_exhaustive]
pub enum LoadError {
    /// No library was found, or the dynamic linker refused it.
    #[non_exhaustive]
    Library {
        /// The requested library: `libibverbs.so.1` or `librdmacm.so.1`.
        library: &'static str,
        /// The names that were tried.
        tried: Vec<String>,
        /// Error of the dynamic linker.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The library lacks a function.
    #[non_exhaustive]
    Symbol {
        /// Name of the library.
        library: String,
        /// Name of the missing function.
        name: &'static str,
        /// First rdma-core release with the function.
        since: u32,
    },
}

impl LoadError {
    /// Says what to install or to set to use devices of the kernel. The message of the error ends with it.
    #[must_use]
    pub fn advice(&self) -> String {
        match self {
            Self::Library { library, .. } => {
                let (debian, redhat, variable) = if *library == IBVERBS {
                    ("libibverbs1 ibverbs-providers", "libibverbs", "RDMA_SYS_LIBIBVERBS")
                } else {
                    ("librdmacm1t64, before Debian 13 and Ubuntu 24.04 librdmacm1", "librdmacm", "RDMA_SYS_LIBRDMACM")
                };
                format!(
                    "install rdma-core (Debian and Ubuntu: apt install {debian}; Fedora and RHEL: dnf install {redhat}), or set \
                     {variable} to the path of the library; if it is set, correct or unset it"
                )
            }
            Self::Symbol { .. } => "rdma-core 44 or newer is required".to_owned(),
        }
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Library { library, tried, source } => {
                write!(f, "cannot load {library} (tried {}): {source}; {}", tried.join(", "), self.advice())
            }
            Self::Symbol { library, name, since } => {
                write!(f, "{library} lacks {name}, which rdma-core has since release {since}: {}", self.advice())
            }
        }
    }
}

// No source: the text already includes it, and reports that print the chain would print it twice.
impl Error for LoadError {}

/// A provider cannot be installed any more: the table is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AlreadyLoaded {
    /// The library whose table is already set.
    pub library: &'static str,
}

impl fmt::Display for AlreadyLoaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} was loaded or installed before; install a provider before the first verb", self.library)
    }
}

impl Error for AlreadyLoaded {}
