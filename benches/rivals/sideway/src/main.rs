//! Runs the loops over the crate sideway, in three variants:
//!
//! - `sideway`: its extended and basic objects;
//! - `generic`: its enums, which dispatch to either kind of object;
//! - `reused`: its basic objects, with one poller for all polls.

mod loops;
mod rig;

use std::process::ExitCode;

use loops::{basic, extended, generic, reused};
use rdma_rivals::{Result, endless, finish, measure};
use rig::{Basic, Extended, Generic, Rig};

fn main() -> ExitCode {
    finish(run())
}

fn run() -> Result<()> {
    let rig = Rig::new()?;
    let rows: [Row<Extended>; 6] = [
        ("ex1", extended::one, generic::one),
        ("ex16", extended::sixteen, generic::sixteen),
        ("rv1", extended::receive, generic::receive),
        ("in1", extended::inline, generic::inline),
        ("em_ex", extended::empty, generic::empty),
        ("poll_ex", extended::poll, generic::poll),
    ];
    each(&rows, || rig.extended())?;
    let rows: [Row<Basic>; 4] = [
        ("cl1", basic::one, generic::one),
        ("cl16", basic::sixteen, generic::sixteen),
        ("em_cl", basic::empty, generic::empty),
        ("poll_cl", basic::poll, generic::poll),
    ];
    each(&rows, || rig.basic())?;
    let rows: [(_, Loop<Basic>); 4] =
        [("cl1", reused::one), ("cl16", reused::sixteen), ("em_cl", reused::empty), ("poll_cl", reused::poll)];
    for (name, function) in rows {
        run_one("reused", name, rig.basic()?, function)?;
    }
    Ok(())
}

type Loop<O> = fn(&mut O, u64) -> u64;

/// A loop with its name, over the objects themselves and over the enums.
type Row<O> = (&'static str, Loop<O>, Loop<Generic>);

/// Runs all rows, over the objects themselves and over the enums.
fn each<O: Into<Generic>>(rows: &[Row<O>], make: impl Fn() -> Result<O>) -> Result<()> {
    for (name, concrete, dispatching) in rows {
        run_one("sideway", name, make()?, *concrete)?;
        run_one("generic", name, make()?.into(), *dispatching)?;
    }
    Ok(())
}

/// Runs one loop. `objects` must be the latest ones, because [`endless`] affects the latest completion queue.
fn run_one<O>(variant: &str, name: &str, mut objects: O, function: Loop<O>) -> Result<()> {
    if name.starts_with("poll") {
        endless()?;
    }
    measure(variant, name, |n| function(&mut objects, n))
}
