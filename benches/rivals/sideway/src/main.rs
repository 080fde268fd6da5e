//! Runs the loops over sideway: its extended and basic objects, as `sideway`; those behind its enums that dispatch to either,
//! as `generic`; and the basic ones with a poller that is kept, as `kept`.

mod loops;
mod rig;

use std::process::ExitCode;

use loops::{basic, extended, generic, kept};
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
        [("cl1", kept::one), ("cl16", kept::sixteen), ("em_cl", kept::empty), ("poll_cl", kept::poll)];
    for (name, function) in rows {
        run_one("kept", name, rig.basic()?, function)?;
    }
    Ok(())
}

type Loop<O> = fn(&mut O, u64) -> u64;

/// A loop over the objects themselves, and over the enums that hold them.
type Row<O> = (&'static str, Loop<O>, Loop<Generic>);

fn each<O: Into<Generic>>(rows: &[Row<O>], make: impl Fn() -> Result<O>) -> Result<()> {
    for (name, concrete, dispatching) in rows {
        run_one("sideway", name, make()?, *concrete)?;
        run_one("generic", name, make()?.into(), *dispatching)?;
    }
    Ok(())
}

/// `objects` are the newest ones.
fn run_one<O>(variant: &str, name: &str, mut objects: O, function: Loop<O>) -> Result<()> {
    if name.starts_with("poll") {
        endless()?;
    }
    measure(variant, name, |n| function(&mut objects, n))
}
