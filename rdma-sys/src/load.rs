//! Finding libibverbs and librdmacm while the program runs.

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

/// libibverbs: loaded at the first call; the same table, or the same error, ever after.
///
/// It is `libibverbs.so.1` from where the dynamic linker looks, unless `RDMA_SYS_LIBIBVERBS` names another library (then
/// only that one is tried) or [`install_verbs`] came first. It stays loaded until the process ends: providers register
/// themselves in it, and every object of it holds pointers to its code.
///
/// # Errors
/// [`LoadError`], which says what was tried and what to do.
pub fn verbs() -> Result<&'static Verbs, &'static LoadError> {
    // SAFETY: libibverbs.so.1 is the SONAME of the ABI that the table describes. Whoever sets the variable vouches for
    // the library, as with LD_PRELOAD.
    let load = || unsafe { Verbs::load_from(named(IBVERBS, "RDMA_SYS_LIBIBVERBS")) };
    VERBS.get_or_init(load).as_ref()
}

/// librdmacm: loaded at the first call; the same table, or the same error, ever after.
///
/// It is `librdmacm.so.1` from where the dynamic linker looks, unless `RDMA_SYS_LIBRDMACM` names another library (then
/// only that one is tried) or [`install_rdmacm`] came first. libibverbs is loaded before it, so that both share the
/// copy that [`verbs`] uses, as long as its SONAME is `libibverbs.so.1`.
///
/// # Errors
/// [`LoadError`], which says what was tried and what to do.
pub fn rdmacm() -> Result<&'static RdmaCm, &'static LoadError> {
    let load = || {
        // librdmacm needs libibverbs and would open the default one by itself. Without any, opening librdmacm fails and
        // says so; another provider's librdmacm may not need it.
        _ = verbs();
        // SAFETY: as in `verbs`, for librdmacm.so.1.
        unsafe { RdmaCm::load_from(named(LIBRDMACM, "RDMA_SYS_LIBRDMACM")) }
    };
    RDMACM.get_or_init(load).as_ref()
}

fn named(default: &str, variable: &str) -> OsString {
    // SAFETY: reads a value that the kernel gave the process at its start.
    let is_privileged = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    // As with LD_PRELOAD, whoever starts a set-user-ID program does not choose its code.
    let chosen = if is_privileged { None } else { std::env::var_os(variable) };
    chosen.unwrap_or_else(|| default.into())
}

/// Makes [`verbs`] return `table`, for a provider that is linked into the program.
///
/// A provider that has its own connection manager installs both tables: librdmacm from the system would hand out
/// contexts of the system's libibverbs.
///
/// # Errors
/// [`AlreadyLoaded`] when [`verbs`] was called before, even if loading failed then.
///
/// # Safety
/// Each function must have the signature and the behaviour that rdma-core documents for its name.
pub unsafe fn install_verbs(table: Verbs) -> Result<(), AlreadyLoaded> {
    VERBS.set(Ok(table)).map_err(|_| AlreadyLoaded { library: IBVERBS })
}

/// Makes [`rdmacm`] return `table`, for a connection manager that is linked into the program.
///
/// # Errors
/// [`AlreadyLoaded`] when [`rdmacm`] was called before, even if loading failed then.
///
/// # Safety
/// As for [`install_verbs`].
pub unsafe fn install_rdmacm(table: RdmaCm) -> Result<(), AlreadyLoaded> {
    RDMACM.set(Ok(table)).map_err(|_| AlreadyLoaded { library: LIBRDMACM })
}

impl Verbs {
    /// Loads the library of that name or path, for good, without making it the one of [`verbs`].
    ///
    /// # Errors
    /// [`LoadError::Library`] when it cannot be loaded, [`LoadError::Symbol`] when it lacks a function of
    /// rdma-core 44.
    ///
    /// # Safety
    /// Loading runs the library's initialisers. What it exports under the names of libibverbs must be those functions.
    pub unsafe fn load_from(library: impl AsRef<OsStr>) -> Result<Self, LoadError> {
        // SAFETY: the caller vouches for the library.
        unsafe { load(IBVERBS, library.as_ref(), Self::resolve) }
    }

    /// Builds the table from a function that finds symbols; it returns null for those that do not exist. `library` is
    /// a name for error messages.
    ///
    /// # Errors
    /// [`LoadError::Symbol`] when `find` returns null for a function of rdma-core 44.
    ///
    /// # Safety
    /// What `find` returns must be null, or point to a function that has the signature and the behaviour that rdma-core
    /// documents for that name and that stays loaded.
    pub unsafe fn from_lookup(library: &str, mut find: impl FnMut(&CStr) -> *mut c_void) -> Result<Self, LoadError> {
        // SAFETY: the caller vouches for `find`.
        unsafe { Self::resolve(&mut Lookup { library, find: &mut find }) }
    }
}

impl RdmaCm {
    /// Loads the library of that name or path, for good, without making it the one of [`rdmacm`].
    ///
    /// # Errors
    /// [`LoadError::Library`] when it cannot be loaded, [`LoadError::Symbol`] when it lacks a function of
    /// rdma-core 44.
    ///
    /// # Safety
    /// Loading runs the library's initialisers. What it exports under the names of librdmacm must be those functions.
    pub unsafe fn load_from(library: impl AsRef<OsStr>) -> Result<Self, LoadError> {
        // SAFETY: the caller vouches for the library.
        unsafe { load(LIBRDMACM, library.as_ref(), Self::resolve) }
    }

    /// Builds the table from a function that finds symbols; see [`Verbs::from_lookup`].
    ///
    /// # Errors
    /// [`LoadError::Symbol`] when `find` returns null for a function of rdma-core 44.
    ///
    /// # Safety
    /// As for [`Verbs::from_lookup`].
    pub unsafe fn from_lookup(library: &str, mut find: impl FnMut(&CStr) -> *mut c_void) -> Result<Self, LoadError> {
        // SAFETY: the caller vouches for `find`.
        unsafe { Self::resolve(&mut Lookup { library, find: &mut find }) }
    }
}

/// # Safety
/// As for [`Verbs::load_from`].
unsafe fn load<T>(
    soname: &'static str,
    name: &OsStr,
    resolve: unsafe fn(&mut Lookup<'_>) -> Result<T, LoadError>,
) -> Result<T, LoadError> {
    // NOW: an incomplete installation fails here, as a value, and not at the first call, by abort.
    // LOCAL: librdmacm exports names as common as `rread` and `rpoll`, which must not stand in for anyone else's; the
    // providers find libibverbs through their own dependency on it, not through the global scope.
    // SAFETY: the caller vouches for the library's initialisers.
    let handle = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| LoadError::Library {
        library: soname,
        tried: vec![name.to_string_lossy().into_owned()],
        source: Box::new(error),
    })?;
    let mut find = |symbol: &CStr| {
        // dlsym returns the default version of a symbol, which is the one that the table describes; the older one of
        // the same name has other structure layouts.
        // SAFETY: the symbol is only asked for its address.
        let found = unsafe { handle.get::<*mut c_void>(symbol.to_bytes_with_nul()) };
        found.map_or(core::ptr::null_mut(), |symbol| symbol.as_raw_ptr())
    };
    // SAFETY: the caller vouches for the library's functions, which stay: an error closes the handle and leaves no
    // pointer behind, success gives the handle up below.
    let table = unsafe { resolve(&mut Lookup { library: &name.to_string_lossy(), find: &mut find }) }?;
    // Never closed.
    _ = handle.into_raw();
    Ok(table)
}

/// Where a table takes its functions from.
pub(crate) struct Lookup<'a> {
    library: &'a str,
    find: &'a mut dyn FnMut(&CStr) -> *mut c_void,
}

impl Lookup<'_> {
    /// # Safety
    /// `F` must be the type of a pointer to the function of that name.
    pub(crate) unsafe fn required<F: Copy>(&mut self, name: &'static CStr, since: u32) -> Result<F, LoadError> {
        // SAFETY: the caller vouches for `F`.
        unsafe { self.optional(name) }.ok_or_else(|| LoadError::Symbol {
            library: self.library.to_owned(),
            name: name.to_str().unwrap_or_default(),
            since,
        })
    }

    /// # Safety
    /// As for [`required`](Self::required).
    pub(crate) unsafe fn optional<F: Copy>(&mut self, name: &'static CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let address = (self.find)(name);
        // SAFETY: the address is not null, and `F` is the type of a pointer to what is there; both have one size.
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
        /// The library that was wanted: `libibverbs.so.1` or `librdmacm.so.1`.
        library: &'static str,
        /// The names that were tried.
        tried: Vec<String>,
        /// What the dynamic linker said.
        source: Box<dyn Error + Send + Sync>,
    },
    /// A library was found that lacks a function.
    #[non_exhaustive]
    Symbol {
        /// The library that was found.
        library: String,
        /// The function that it lacks.
        name: &'static str,
        /// The rdma-core release that first had it.
        since: u32,
    },
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Library { library, tried, source } => {
                let (debian, redhat, variable) = if *library == IBVERBS {
                    ("libibverbs1 ibverbs-providers", "libibverbs", "RDMA_SYS_LIBIBVERBS")
                } else {
                    ("librdmacm1t64, before Debian 13 and Ubuntu 24.04 librdmacm1", "librdmacm", "RDMA_SYS_LIBRDMACM")
                };
                write!(
                    f,
                    "cannot load {library} (tried {}): {source}; install rdma-core (Debian and Ubuntu: apt install \
                     {debian}; Fedora and RHEL: dnf install {redhat}), or set {variable} to the path of the library; \
                     where it is set, correct it or unset it",
                    tried.join(", ")
                )
            }
            Self::Symbol { library, name, since } => write!(
                f,
                "{library} lacks {name}, which rdma-core has had since release {since}: rdma-core 44 or newer is needed"
            ),
        }
    }
}

// Without a source: the text holds it already, and reports that print a chain would print it twice.
impl Error for LoadError {}

/// A provider was installed too late: the table is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AlreadyLoaded {
    /// The library whose table was set before.
    pub library: &'static str,
}

impl fmt::Display for AlreadyLoaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} was loaded or installed before; install a provider before the first verb", self.library)
    }
}

impl Error for AlreadyLoaded {}
