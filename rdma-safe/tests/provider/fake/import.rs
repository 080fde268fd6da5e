//! Contexts that are opened from a descriptor, and objects that they import. An import is released without destroying its object.

use std::cell::Cell;
use std::ffi::c_int;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering};

use rdma_sys::*;

use super::Inside;
use super::state::{Alloc, Pd, Ptr, State, enter, null, own, plugged};
use super::verbs::{add_context, null_at_once};

/// The kernel's object of one context, or of several that share it: an `eventfd` whose value identifies it.
pub(super) struct Command {
    fd: c_int,
    file: u64,
}

impl Command {
    /// `None` if no descriptor can be created.
    pub(super) fn open(device: i32) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let file = (device as u64) << 32 | u64::from(NEXT.fetch_add(1, Ordering::Relaxed));
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        put(fd, file).then_some(Command { fd, file })
    }

    fn of(fd: c_int) -> Option<Self> {
        let mut file = 0_u64;
        let found = unsafe { libc::read(fd, (&raw mut file).cast(), size_of::<u64>()) } == size_of::<u64>() as isize;
        (found && put(fd, file)).then_some(Command { fd, file })
    }

    pub(super) fn fd(&self) -> c_int {
        self.fd
    }

    fn device(&self) -> i32 {
        (self.file >> 32) as i32
    }
}

fn put(fd: c_int, file: u64) -> bool {
    unsafe { libc::write(fd, (&raw const file).cast(), size_of::<u64>()) == size_of::<u64>() as isize }
}

impl Drop for Command {
    fn drop(&mut self) {
        unsafe { libc::close(self.fd) };
    }
}

/// The behavior of `ibv_import_device` on this thread.
#[derive(Clone, Copy)]
pub(crate) enum Importing {
    Works,
    /// Fails without using the descriptor.
    Refuses(i32),
    /// Closes the descriptor and fails. Before it returns, the number becomes a duplicate of the given descriptor.
    Fails(i32, RawFd),
}

thread_local! {
    static IMPORTING: Cell<Importing> = const { Cell::new(Importing::Works) };
}

/// Runs `f` with the given behavior of `ibv_import_device` on this thread.
pub(crate) fn with_importing<R>(importing: Importing, f: impl FnOnce() -> R) -> R {
    super::table::install();
    IMPORTING.set(importing);
    let result = f();
    IMPORTING.set(Importing::Works);
    result
}

/// A region imported from another context.
pub(super) struct ImportedMr {
    alloc: Alloc,
    pub(super) pd: usize,
    of: usize,
}

pub(super) unsafe extern "C" fn import_device(fd: c_int) -> *mut ibv_context {
    let _inside = Inside::enter();
    match IMPORTING.get() {
        Importing::Works => {}
        Importing::Refuses(errno) => return null_at_once(errno),
        Importing::Fails(errno, other) => {
            assert_eq!(unsafe { libc::dup2(other, fd) }, fd);
            return null_at_once(errno);
        }
    }
    let Some(command) = Command::of(fd) else { return null_at_once(libc::EINVAL) };
    let Some(device) = plugged().into_iter().find(|device| device.index == command.device()) else {
        std::mem::forget(command);
        return null_at_once(libc::ENODEV);
    };
    enter(device.raw.0, "ibv_import_device", |state, device| add_context(state, device, Some(command)))
}

pub(super) unsafe extern "C" fn import_pd(context: *mut ibv_context, handle: u32) -> *mut ibv_pd {
    enter(context, "ibv_import_pd", |state, device| {
        if let Some(errno) = state.fault("ibv_import_pd") {
            return null(errno);
        }
        let of = state.pds.iter().find(|(_, pd)| {
            let own = pd.extends.is_none() && pd.imports.is_none();
            own && unsafe { (*pd.raw.0).handle } == handle && state.is_shared(pd.context, context.addr())
        });
        let Some(of) = of.map(|(address, _)| *address) else { return null(libc::ENOENT) };
        let (alloc, raw) = Alloc::new(ibv_pd { context, handle });
        own(raw, device);
        let pd = Pd { alloc, raw: Ptr(raw), context: context.addr(), extends: None, imports: Some(of) };
        state.pds.insert(raw.addr(), pd);
        raw
    })
}

pub(super) unsafe extern "C" fn unimport_pd(raw: *mut ibv_pd) {
    const VERB: &str = "ibv_unimport_pd";
    enter(raw, VERB, |state, _| {
        let address = raw.addr();
        let Some(imports) = state.pd(address, VERB).map(|pd| pd.imports) else { return };
        let children = state.children_of_pd(address);
        if imports.is_none() || children > 0 {
            return state
                .violation(format!("{VERB} of a domain that was not imported, or that has {children} objects"));
        }
        let pd = state.pds.remove(&address).unwrap();
        state.retire(pd.alloc);
    })
}

/// An imported region has no address.
pub(super) unsafe extern "C" fn import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr {
    enter(pd, "ibv_import_mr", |state, device| {
        if let Some(errno) = state.fault("ibv_import_mr") {
            return null(errno);
        }
        let Some(context) = state.pd(pd.addr(), "ibv_import_mr").map(|pd| pd.context) else {
            return null(libc::EINVAL);
        };
        let of = state.mrs.iter().find(|(_, mr)| {
            let found = unsafe { (*mr.raw.0).handle } == handle;
            found && state.pds.get(&mr.pd).is_some_and(|pd| state.is_shared(pd.context, context))
        });
        let Some((address, mr)) = of else { return null(libc::ENOENT) };
        let (of, length, lkey, rkey) = (*address, mr.len, mr.lkey, mr.rkey);
        if state.protection(mr.pd) != state.protection(pd.addr()) {
            state.violation("ibv_import_mr to another domain than the region's");
        }
        let context = unsafe { (*pd).context };
        let (alloc, raw) = Alloc::new(ibv_mr { context, pd, addr: std::ptr::null_mut(), length, handle, lkey, rkey });
        own(raw, device);
        state.imported_mrs.insert(raw.addr(), ImportedMr { alloc, pd: pd.addr(), of });
        raw
    })
}

pub(super) unsafe extern "C" fn unimport_mr(raw: *mut ibv_mr) {
    enter(raw, "ibv_unimport_mr", |state, _| match state.imported_mrs.remove(&raw.addr()) {
        Some(mr) => state.retire(mr.alloc),
        None => state.violation("ibv_unimport_mr of a region that is not an import"),
    });
}

impl State {
    /// Whether two contexts share an object of the kernel.
    fn is_shared(&self, a: usize, b: usize) -> bool {
        let file = |context| self.contexts.get(context)?.command.as_ref().map(|command| command.file);
        file(&a).is_some() && file(&a) == file(&b)
    }

    /// Notes a violation if an object is destroyed before all its imports are released.
    pub(super) fn check_imports(&mut self, address: usize, verb: &str) {
        let domains = self.pds.values().filter(|pd| pd.imports == Some(address)).count();
        let regions = self.imported_mrs.values().filter(|mr| mr.of == address).count();
        if domains + regions > 0 {
            self.violation(format!("{verb} of an object with imports"));
        }
    }
}
