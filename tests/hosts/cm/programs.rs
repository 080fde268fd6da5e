//! `rping` and `cmtime` between soft0 and rxe0: the programs of rdma-core, and the examples of this workspace.

use std::process::Command;
use std::time::Instant;

use crate::lab::{LIMIT, Lab, c_program, wait_for_listener};
use crate::program::{Program, Running};

/// Package of the programs of rdma-core.
const PACKAGE: &str = "rdmacm-utils";

/// The program of rdma-core, and the example.
pub(super) fn both_kinds(name: &str) -> [Program; 2] {
    [c_program(name, PACKAGE), Program::example(name).expect("the example was built")]
}

/// Starts a client, repeatedly until the server listens. Returns its output.
fn run_client(lab: &Lab, program: &Program, environment: &[(&str, String)], arguments: &[&str]) -> String {
    let start = Instant::now();
    let mut attempts = 0;
    loop {
        attempts += 1;
        let all = [lab.environment(), environment.to_vec()].concat();
        let mut running = program.start_in(&all, arguments);
        let (status, output) = running.finish_within(LIMIT);
        // The C programs name the event and the reason, the examples explain it.
        let is_refused = output.contains("nobody listens") || output.contains("REJECTED, error 8");
        if is_refused && start.elapsed() < LIMIT {
            continue;
        }
        // The C client of cmtime reports no failure.
        assert!(status.success() && !is_refused, "{}\n{output}", running.command);
        println!("{:.1} s, attempt {attempts}: {}", start.elapsed().as_secs_f64(), running.command);
        return output;
    }
}

/// Runs pings between a server at one host and a client at the other one.
pub(super) fn rping(lab: &mut Lab, program: &Program, first_serves: bool, environment: &[(&str, String)], pings: &str) {
    lab.port += 1;
    let port = lab.port.to_string();
    let is_server = first_serves == lab.host.is_first;
    let number: u32 = pings.parse::<u32>().expect("a number") - 1;
    let last = format!("ping data: rdma-ping-{number}: ");
    if is_server {
        let all = [lab.environment(), environment.to_vec()].concat();
        let mut running = program.start_in(&all, &["-s", "-v", "-a", &lab.host.own, "-p", &port, "-S", "65535"]);
        let (status, output) = running.finish_within(LIMIT);
        // The C server may report the disconnect of its client as a failure, depending on which of two events it sees first.
        let may_fail = matches!(program, Program::C { .. });
        assert!(status.success() || may_fail, "{}: {status}\n{output}", running.command);
        assert!(output.contains(&format!("server {last}")), "{}\n{output}", running.command);
    } else {
        let arguments = ["-c", "-v", "-V", "-C", pings, "-a", &lab.host.peer, "-p", &port, "-S", "65535"];
        let output = run_client(lab, program, environment, &arguments);
        assert!(output.contains(&last), "{output}");
    }
    lab.barrier.wait();
}

/// Whether the ends of a program wait for each other. In rdma-core 44 they do not, and the C server never ends.
fn synchronises(program: &Program) -> bool {
    let Program::C { file, .. } = program else { return true };
    let usage = Command::new(file).arg("-h").output().expect("the program starts");
    String::from_utf8_lossy(&usage.stdout).contains("-q base_qpn")
}

/// Makes connections between a server at one host and a client at the other one, all at the same time.
pub(super) fn cmtime(
    lab: &mut Lab,
    program: &Program,
    first_serves: bool,
    environment: &[(&str, String)],
    connections: &str,
) {
    lab.port += 1;
    let port = lab.port.to_string();
    let is_server = first_serves == lab.host.is_first;
    let mut serving: Option<Running> = None;
    if is_server {
        let all = [lab.environment(), environment.to_vec()].concat();
        let running = program.start_in(&all, &["-b", &lab.host.own, "-p", &port, "-c", connections]);
        match program {
            Program::Rust(_) => running.wait_for("listening at"),
            // The client gives up without a message if the server does not listen on TCP.
            Program::C { .. } if synchronises(program) => wait_for_listener(lab.port),
            Program::C { .. } => {}
        }
        serving = Some(running);
    }
    lab.barrier.wait();
    if !is_server {
        let arguments = ["-s", &lab.host.peer, "-b", &lab.host.own, "-p", &port, "-c", connections];
        let output = run_client(lab, program, environment, &arguments);
        assert!(output.lines().any(|line| line.starts_with("disconnect")), "{output}");
    }
    lab.barrier.wait();
    if let Some(mut running) = serving.filter(|_| synchronises(program)) {
        let (status, output) = running.finish_within(LIMIT);
        assert!(status.success(), "{}: {status}\n{output}", running.command);
    }
}
