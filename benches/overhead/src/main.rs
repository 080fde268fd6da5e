//! Runs loops over verbs for `cargo xtask bench overhead`, which counts their instructions.
//!
//! Each loop performs the same operations in every variant:
//!
//! - C, and rdma-sys;
//! - both APIs of rdma-safe, with the interface of each object known before the loop;
//! - the raw API with a check of the interface on every call (`any`);
//! - rdma-async on one thread (`local`), and with connections that threads share (`shared`), each also with the driver taking all
//!   completions (`driven`).
//!
//! Each loop runs twice, with the numbers of operations in [`COUNTS`]. callgrind writes a profile of each run, and the program
//! prints a line with its results.

mod any;
mod awaited;
mod callgrind;
mod counting;
mod owned;
mod raw;
mod rig;
mod sys;

use std::ffi::CString;
use std::path::Path;
use std::process::ExitCode;

use libloading::os::unix::Library;
use rdma_async::Idle;
use rdma_safe::Endpoint;
use rdma_safe::interface::{Classic, Extended};

use counting::Counting;
use rig::{FAILED, Objects, Owned, Raw, Result, Rig, Setting};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Numbers of operations of the two runs. Their difference cancels the fixed cost of a loop.
const COUNTS: [u64; 2] = [1600, 17600];

struct Row {
    name: &'static str,
    setting: Setting,
    sys: Option<unsafe fn(&Objects, u64) -> u64>,
    raw: Option<fn(&mut Raw, u64) -> u64>,
    any: Option<fn(&mut Raw, u64) -> u64>,
    owned: Option<OwnedLoop>,
    batch: Option<OwnedLoop>,
}

#[derive(Clone, Copy)]
enum OwnedLoop {
    Extended(fn(&mut Owned<Extended>, u64) -> u64),
    Classic(fn(&mut Owned<Classic>, u64) -> u64),
}

const EXTENDED: Setting =
    Setting { classic: false, receive_at_once: false, endless: false, atomic: false, datagrams: false };
const CLASSIC: Setting = Setting { classic: true, ..EXTENDED };

macro_rules! rows {
    ($(
        $name:ident: $setting:expr
        $(, sys $sys:ident)? $(, raw $raw:ident)? $(, any $any:ident)? $(, owned $owned:ident over $interface:ident)?
        $(, batch $batch:ident over $batch_interface:ident)?;
    )+) => {
        [$(Row {
            name: stringify!($name),
            setting: $setting,
            sys: rows!(@ sys $($sys)?),
            raw: rows!(@ raw $($raw)?),
            any: rows!(@ any $($any)?),
            owned: rows!(@ owned $($owned $interface)?),
            batch: rows!(@ owned $($batch $batch_interface)?),
        }),+]
    };
    (@ $module:ident) => { None };
    (@ $module:ident $function:ident) => { Some($module::$function) };
    (@ $module:ident $function:ident $interface:ident) => { Some(OwnedLoop::$interface($module::$function)) };
}

fn rows() -> impl IntoIterator<Item = Row> {
    rows! {
        ex1: EXTENDED, sys loop_sys_ex1, raw loop_raw_ex1, any loop_any_ex1;
        ex16: EXTENDED, sys loop_sys_ex16, raw loop_raw_ex16, any loop_any_ex16;
        cl1: CLASSIC, sys loop_sys_cl1, raw loop_raw_cl1, any loop_any_cl1;
        cl16: CLASSIC, sys loop_sys_cl16, raw loop_raw_cl16, any loop_any_cl16;
        rv1: EXTENDED, sys loop_sys_rv1, raw loop_raw_rv1;
        rv16: EXTENDED, sys loop_sys_rv16, raw loop_raw_rv16;
        srq_rv1: EXTENDED, sys loop_sys_srq_rv1, raw loop_raw_srq_rv1;
        srq_rv16: EXTENDED, sys loop_sys_srq_rv16, raw loop_raw_srq_rv16;
        in1: EXTENDED, sys loop_sys_in1, raw loop_raw_in1, any loop_any_in1;
        em_ex: EXTENDED, sys loop_sys_em_ex, raw loop_raw_em_ex, any loop_any_em_ex, owned loop_owned_em_ex over Extended;
        em_cl: CLASSIC, sys loop_sys_em_cl, raw loop_raw_em_cl, any loop_any_em_cl, owned loop_owned_em_cl over Classic;
        poll_ex: Setting { endless: true, ..EXTENDED }, sys loop_sys_poll_ex, raw loop_raw_poll_ex, any loop_any_poll_ex;
        poll_cl: Setting { endless: true, ..CLASSIC }, sys loop_sys_poll_cl, raw loop_raw_poll_cl, any loop_any_poll_cl;
        all_ex: Setting { endless: true, ..EXTENDED }, sys loop_sys_all_ex, raw loop_raw_all_ex, any loop_any_all_ex;
        all_cl: Setting { endless: true, ..CLASSIC }, sys loop_sys_all_cl, raw loop_raw_all_cl, any loop_any_all_cl;
        read: EXTENDED, sys loop_sys_read, raw loop_raw_read, any loop_any_read;
        write_imm: EXTENDED, sys loop_sys_write_imm, raw loop_raw_write_imm, any loop_any_write_imm;
        send_inv: EXTENDED, sys loop_sys_send_inv, raw loop_raw_send_inv, any loop_any_send_inv;
        fetch_add: Setting { atomic: true, ..EXTENDED }, sys loop_sys_fetch_add, raw loop_raw_fetch_add, any loop_any_fetch_add;
        bind_mw: EXTENDED, sys loop_sys_bind_mw;
        ud_send: Setting { datagrams: true, ..EXTENDED }, sys loop_sys_ud_send, raw loop_raw_ud_send, any loop_any_ud_send;
        ud_send_cl: Setting { datagrams: true, ..CLASSIC }, sys loop_sys_ud_send_cl, raw loop_raw_ud_send_cl;
        send_ex1: EXTENDED, owned loop_owned_send_ex1 over Extended;
        send_ex16: EXTENDED, owned loop_owned_send_ex16 over Extended, batch loop_batch_send_ex16 over Extended;
        send_cl1: CLASSIC, owned loop_owned_send_cl1 over Classic;
        send_cl16: CLASSIC, owned loop_owned_send_cl16 over Classic, batch loop_batch_send_cl16 over Classic;
        recv_ex1: Setting { receive_at_once: true, ..EXTENDED }, owned loop_owned_recv_ex1 over Extended;
        recv_cl1: Setting { receive_at_once: true, ..CLASSIC }, owned loop_owned_recv_cl1 over Classic;
        qp: EXTENDED, raw loop_raw_qp;
        mr: EXTENDED, raw loop_raw_mr;
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs all loops. An argument `NAME=PATH` names a compiler and its build of loops.c.
fn run() -> Result<()> {
    let rig = Rig::new()?;
    let mut c = Vec::new();
    for argument in std::env::args().skip(1) {
        let (name, path) = argument.split_once('=').ok_or("expected an argument NAME=PATH")?;
        // SAFETY: the library has no initialisers.
        c.push((name.to_owned(), unsafe { Library::new(Path::new(path)) }?));
    }
    for Row { name, setting, sys, raw, any, owned, batch } in rows() {
        // The variants share the objects, so that each finds the heap in the same state: it decides what the allocations of the
        // provider cost.
        let mut rust = rig.raw(setting)?;
        let mut objects = rust.objects();
        for (compiler, library) in &c {
            let symbol = format!("loop_{name}\0");
            // SAFETY: loops.c defines this function for each row, with this signature.
            let function: unsafe extern "C" fn(*mut Objects, u64) -> u64 = *unsafe { library.get(symbol.as_bytes())? };
            // SAFETY: the objects have the row's setting.
            measure(compiler, name, |n| unsafe { function(&raw mut objects, n) })?;
        }
        if let Some(function) = sys {
            // SAFETY: the objects have the row's setting.
            measure("sys", name, |n| unsafe { function(&objects, n) })?;
        }
        for (variant, function) in [("raw", raw), ("any", any)] {
            if let Some(function) = function {
                measure(variant, name, |n| function(&mut rust, n))?;
            }
        }
        for (variant, function) in [("owned", owned), ("batch", batch)] {
            match function {
                Some(OwnedLoop::Extended(function)) => {
                    let mut owned = rig.owned(setting, Endpoint::with_interface::<Extended>)?;
                    measure(variant, name, |n| function(&mut owned, n))?;
                }
                Some(OwnedLoop::Classic(function)) => {
                    let mut owned = rig.owned(setting, Endpoint::with_interface::<Classic>)?;
                    measure(variant, name, |n| function(&mut owned, n))?;
                }
                None => {}
            }
        }
        if name == "send_ex1" {
            for (idle, driven) in [(Idle::Spin, ""), (Idle::Sleep, " driven")] {
                let mut local = awaited::Awaited::new(rig.pd(), idle)?;
                measure(&format!("local{driven}"), name, |n| awaited::loop_local_send_ex1(&mut local, n))?;
                let mut shared = awaited::Awaited::new(rig.pd(), idle)?;
                measure(&format!("shared{driven}"), name, |n| awaited::loop_shared_send_ex1(&mut shared, n))?;
            }
        }
    }
    Ok(())
}

/// Runs `function` with each of [`COUNTS`] and prints a line for each run.
fn measure(variant: &str, name: &str, mut function: impl FnMut(u64) -> u64) -> Result<()> {
    for count in COUNTS {
        let profile = CString::new(format!("{variant} {name} {count}"))?;
        let before = counting::calls();
        let checksum = callgrind::profile(&profile, || function(count));
        let allocations = counting::calls() - before;
        if checksum == FAILED {
            return Err(format!("{name} over {variant} failed").into());
        }
        println!("{variant}\t{name}\t{count}\t{checksum}\t{allocations}");
    }
    Ok(())
}
