//! Connections by address between soft0 and the kernel's connection manager over rxe0.

mod connections;
mod counters;
mod datagrams;
mod killed;
mod messages;
mod pair;
mod programs;
mod steps;

use crate::lab::{Lab, role};
use messages::Messages;
use pair::Pair;

#[test]
fn soft0_and_the_kernel_agree_on_each_step() {
    const NAME: &str = "cm::soft0_and_the_kernel_agree_on_each_step";
    if role().is_some() {
        return run_scenarios();
    }
    let Some(mut lab) = Lab::new() else { return };
    let capture = lab.capture("cm");
    lab.barrier.wait();
    lab.run_in_role(NAME, "one end");
    lab.barrier.wait();
    let Some(capture) = capture else { return };
    let messages = Messages::of(capture, &lab.host);
    messages.expect_all_kinds();
    messages.expect_tos();
    messages.show_settings();
}

fn run_scenarios() {
    let mut pair = Pair::new();
    connections::data_and_disconnects(&mut pair);
    connections::connections_in_a_row(&mut pair);
    connections::rejections(&mut pair);
    connections::missing_listeners(&mut pair);
    connections::unanswered_requests(&mut pair);
    connections::type_of_service(&mut pair);
    datagrams::lookups(&mut pair);
    datagrams::missing_services(&mut pair);
    steps::parameters_of_both_sides(&mut pair);
    steps::vendor_options(&mut pair);
    steps::slow_programs(&mut pair);
    steps::ends_in_each_state(&mut pair);
    pair.use_ipv6();
    connections::data_and_disconnects(&mut pair);
    datagrams::lookups(&mut pair);
}

/// The messages of soft0 take longer than its first retransmission interval, so Linux receives retransmissions of requests that
/// have ended.
#[test]
fn slow_messages_change_no_outcome() {
    const NAME: &str = "cm::slow_messages_change_no_outcome";
    if role().is_some() {
        return run_slow_scenarios();
    }
    let Some(mut lab) = Lab::new() else { return };
    lab.faults = "only=cm,delay=100ms";
    lab.barrier.wait();
    lab.run_in_role(NAME, "one end");
    lab.barrier.wait();
}

fn run_slow_scenarios() {
    let mut pair = Pair::new();
    connections::rejections(&mut pair);
    connections::unanswered_requests(&mut pair);
    datagrams::lookups(&mut pair);
    steps::ends_in_each_state(&mut pair);
}

#[test]
fn rping_and_cmtime_run_in_both_roles() {
    let Some(mut lab) = Lab::new() else { return };
    lab.barrier.wait();
    for first_serves in [true, false] {
        for program in programs::both_kinds("rping") {
            programs::rping(&mut lab, &program, first_serves, &[], "5");
        }
        for (program, connections) in programs::both_kinds("cmtime").iter().zip(["100", "20"]) {
            programs::cmtime(&mut lab, program, first_serves, &[], connections);
        }
    }
}

/// Losses of the packets that soft0 sends.
const FAULTS: &str = "seed=11,drop=0.01";

#[test]
fn connections_and_data_survive_packet_loss() {
    let Some(mut lab) = Lab::new() else { return };
    lab.barrier.wait();
    let impairment = lab.host.is_first.then(|| lab.host.impair(&["loss", "1%"]));
    let faults = if lab.has_soft() { vec![("RDMA_SOFT_FAULTS", FAULTS.to_owned())] } else { Vec::new() };
    let [_, rping] = programs::both_kinds("rping");
    let [_, cmtime] = programs::both_kinds("cmtime");
    for first_serves in [true, false] {
        programs::rping(&mut lab, &rping, first_serves, &faults, "20");
        programs::cmtime(&mut lab, &cmtime, first_serves, &faults, "30");
    }
    assert!(impairment.is_none_or(|impairment| impairment.dropped() > 0), "no packet was lost");
}

#[test]
fn a_killed_program_ends_its_connections_and_a_new_one_takes_its_address() {
    const NAME: &str = "cm::a_killed_program_ends_its_connections_and_a_new_one_takes_its_address";
    match role().as_deref() {
        Some("victim") => killed::die(&mut Pair::new()),
        Some("observer") => killed::observe(&mut Pair::new()),
        Some(_) => killed::connect_again(&mut Pair::new()),
        None => {}
    }
    if role().is_some() {
        return;
    }
    let Some(mut lab) = Lab::new() else { return };
    for first_dies in [true, false] {
        lab.barrier.wait();
        if first_dies == lab.host.is_first {
            let mut victim = lab.start_in_role(NAME, "victim");
            victim.wait_for(killed::READY);
            victim.kill();
            drop(victim);
            lab.run_in_role(NAME, "successor");
        } else {
            lab.run_in_role(NAME, "observer");
        }
    }
}
