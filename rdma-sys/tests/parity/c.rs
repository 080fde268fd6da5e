//! The C side, which the test compiles with the headers in `RDMA_CORE_INCLUDE`.

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use libloading::os::unix::Library;

use crate::recorder;

/// The include folder, or `None` after printing why. With `RDMA_REQUIRE_HEADERS=1` a missing folder is a failure.
pub fn include() -> Option<PathBuf> {
    let include = std::env::var_os("RDMA_CORE_INCLUDE").map(PathBuf::from);
    if include.is_none() {
        let line = "RDMA_CORE_INCLUDE is not set (the include folder of rdma-core's headers)";
        assert!(std::env::var_os("RDMA_REQUIRE_HEADERS").is_none_or(|value| value != "1"), "{line}");
        println!("skipped: parity: {line}");
    }
    include
}

/// Compiles `source` to a shared library and loads it.
pub fn compile(name: &str, source: &Path, include: &Path, options: &[&str]) -> Library {
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}.so", std::process::id()));
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let output = Command::new(&compiler)
        .args(["-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-Wl,-Bsymbolic", "-I"])
        .args([include, source])
        .args(options)
        .arg("-o")
        .arg(&library)
        .output()
        .unwrap_or_else(|error| panic!("starting {}: {error}", Path::new(&compiler).display()));
    assert!(
        output.status.success(),
        "{} does not compile against {}:\n{}",
        source.display(),
        include.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    let loaded = unsafe { Library::new(&library) }.unwrap();
    std::fs::remove_file(library).unwrap();
    loaded
}

pub fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/inlines.c")
}

/// The compiled inline functions. Both sides call the recorders instead of libibverbs.
pub fn inlines() -> Option<&'static Library> {
    static INLINES: OnceLock<Library> = OnceLock::new();
    let include = include()?;
    Some(INLINES.get_or_init(|| {
        let library = compile("inlines", &source(), &include, &[]);
        install(&library);
        unsafe { rdma_sys::install_verbs(recorder::verbs()) }.unwrap();
        library
    }))
}

/// Passes the recorders to the C side.
pub fn install(library: &Library) {
    unsafe {
        let install = library.get::<unsafe extern "C" fn(*const c_void)>(b"parity_install\0").unwrap();
        install(recorder::stubs().as_ptr().cast());
    }
}

/// The function type of a Rust shim, and the type of its C function.
pub trait Shim {
    type C: Copy;
}

macro_rules! shims {
    ($(($($argument:ident)*))*) => {$(
        impl<R, $($argument),*> Shim for unsafe fn($($argument),*) -> R {
            type C = unsafe extern "C" fn($($argument),*) -> R;
        }
    )*};
}
shims!((A)(A B)(A B C)(A B C D)(A B C D E)(A B C D E F)(A B C D E F G)(A B C D E F G H));

/// The C function `c_NAME`, which has the same type as the shim.
pub fn twin<S: Shim>(_: S, name: &str) -> S::C {
    let library = inlines().expect("the C side is there when cases run");
    let symbol = unsafe { library.get::<S::C>(format!("c_{name}\0").as_bytes()) };
    *symbol.unwrap_or_else(|error| panic!("inlines.c has no c_{name}: {error}"))
}
