//! The example `cmtime` with the C program of the same name. The ends of the C program synchronise only in newer versions.

use std::process::Command;

use crate::pingpong::wait_for_listener;
use crate::support::program::{Program, Running, free_port};
use crate::support::{DEADLINE, Rdma, device, within};

const STEPS: [&str; 17] = [
    "full connect",
    "create id",
    "bind addr",
    "resolve addr",
    "resolve route",
    "create qp",
    "init qp attr",
    "init qp",
    "rtr qp attr",
    "rtr qp",
    "rts qp attr",
    "rts qp",
    "cm connect",
    "establish",
    "disconnect",
    "destroy id",
    "destroy qp",
];

/// The device's IPv4 address, or `None` after printing why the test is skipped.
fn address(rdma: &Rdma) -> Option<String> {
    let address = rdma.gid.gid.ipv4().map(|address| address.to_string());
    if address.is_none() {
        println!("skipped: the GID of the tests is not an IPv4 address");
    }
    address
}

fn programs() -> Option<(Program, Program)> {
    Some((Program::example("cmtime")?, Program::of_rdma_core("cmtime", "rdmacm-utils")?))
}

/// Whether the ends of the C program wait for each other. In rdma-core 44 they do not, and the server never ends.
fn synchronises(c: &Program) -> bool {
    let (Program::C { file, .. } | Program::Rust(file)) = c;
    let usage = Command::new(file).arg("-h").output().expect("the program starts");
    let usage = String::from_utf8_lossy(&usage.stdout).into_owned();
    assert!(usage.contains("-r retries") && !usage.contains("-C controller"), "unknown version of cmtime: {usage}");
    usage.contains("-q base_qpn")
}

/// A table of results, in microseconds for each step.
struct Table {
    with_queue_pairs: bool,
    connections: u64,
    total: Vec<u64>,
    sum: Vec<u64>,
    max: Vec<u64>,
}

fn index(step: &str) -> usize {
    STEPS.iter().position(|name| *name == step).expect("a step")
}

impl Table {
    fn total(&self, step: &str) -> u64 {
        self.total[index(step)]
    }

    fn sum(&self, step: &str) -> u64 {
        self.sum[index(step)]
    }
}

/// All tables in the output of one end.
#[track_caller]
fn tables(text: &str) -> Vec<Table> {
    let mut lines = text.lines();
    let mut tables = Vec::new();
    while let Some(line) = lines.next() {
        let Some((kind, count)) = line.split_once("_conn ") else { continue };
        let connections = count.trim().parse().expect("a number of connections");
        assert!(lines.next().expect("a line").starts_with("threads "), "{text}");
        let heads: Vec<_> = lines.next().expect("a line").split_whitespace().collect();
        assert_eq!(heads[2..], ["total(us)", "us/conn", "sum(us)", "max(us)", "min(us)"], "{text}");
        let (mut total, mut sum, mut max) = (Vec::new(), Vec::new(), Vec::new());
        for (step, line) in STEPS.iter().zip(&mut lines) {
            let numbers = line.strip_prefix(step).unwrap_or_else(|| panic!("no {step:?} in {line:?}"));
            let numbers: Vec<u64> =
                numbers.split_whitespace().map(|number| number.parse().expect("a number")).collect();
            assert_eq!(numbers.len(), 6, "{line}");
            total.push(numbers[1]);
            sum.push(numbers[3]);
            max.push(numbers[4]);
        }
        tables.push(Table { with_queue_pairs: kind == "qp", connections, total, sum, max });
    }
    tables
}

/// The two tables in the output of one end: with and without queue pairs.
#[track_caller]
fn measured(text: &str, connections: u64) -> [Table; 2] {
    let tables: [Table; 2] = tables(text).try_into().unwrap_or_else(|_| panic!("not two tables:\n{text}"));
    for (table, with_queue_pairs) in tables.iter().zip([true, false]) {
        assert_eq!((table.with_queue_pairs, table.connections), (with_queue_pairs, connections), "{text}");
    }
    assert!(tables[0].sum("create qp") > tables[1].sum("create qp"), "{text}");
    tables
}

/// Checks that a client has measured the steps it executes.
fn check_client<const N: usize>(text: &str, tables: [Table; N]) {
    for table in tables {
        for step in ["full connect", "create id", "resolve addr", "resolve route", "cm connect", "disconnect"] {
            assert!(table.total(step) > 0, "{step}:\n{text}");
        }
        // A step of one connection takes no longer than that of all.
        let mut steps = STEPS.iter().zip(table.total.iter().zip(&table.max));
        assert!(steps.all(|(_, (total, max))| *total == 0 || max <= total), "{text}");
    }
}

fn expect_success(running: &mut Running) -> String {
    let (status, text) = running.finish();
    assert!(status.success(), "{status}\n{text}");
    text
}

#[test]
fn our_cmtime_connects_to_the_c_server() {
    let Some(rdma) = device() else { return };
    let (Some(address), Some((ours, c))) = (address(&rdma), programs()) else { return };
    let port = free_port().to_string();
    let synchronises = synchronises(&c);
    let arguments = ["-c", "20", "-p", &port];
    let mut serving = c.start_with(&[&["-b", &address], &arguments[..]].concat());
    let own = ["-s", &address, "-b", &address, "-q", "50000", "-n", "3"];
    let client = || ours.start_with(&[&own[..], &arguments].concat());
    if synchronises {
        wait_for_listener(port.parse().expect("a number"));
        let text = expect_success(&mut client());
        check_client(&text, measured(&text, 20));
        measured(&expect_success(&mut serving), 20);
        return;
    }
    let finished = within(DEADLINE, "a server that listens", || {
        let (status, text) = client().finish();
        (!text.contains("nobody listens")).then_some((status, text))
    });
    assert!(finished.0.success(), "{finished:?}");
    let Ok([table]) = <[Table; 1]>::try_from(tables(&finished.1)) else { panic!("not one table:\n{}", finished.1) };
    assert!(table.with_queue_pairs && table.connections == 20, "{}", finished.1);
    check_client(&finished.1, [table]);
}

#[test]
fn our_cmtime_serves_the_c_client() {
    let Some(rdma) = device() else { return };
    let (Some(address), Some((ours, c))) = (address(&rdma), programs()) else { return };
    let port = free_port().to_string();
    let arguments = ["-c", "20", "-p", &port];
    let mut serving = ours.start_with(&[&["-q", "50000"], &arguments[..]].concat());
    serving.wait_for("listening at");
    let client_output =
        expect_success(&mut c.start_with(&[&["-s", &address, "-b", &address], &arguments[..]].concat()));
    let server_output = expect_success(&mut serving);
    if synchronises(&c) {
        check_client(&client_output, measured(&client_output, 20));
        let [first, second] = measured(&server_output, 20);
        assert!(first.total("cm connect") > 0 && second.total("cm connect") > 0, "{server_output}");
    } else {
        assert!(client_output.contains("\ndisconnect   : "), "{client_output}");
        let [table] = &tables(&server_output)[..] else { panic!("not one table:\n{server_output}") };
        assert!(
            table.with_queue_pairs && table.connections == 20 && table.total("cm connect") > 0,
            "{client_output}{server_output}"
        );
    }
}

/// Name of the network interface of the GID.
fn interface(rdma: &Rdma) -> String {
    let index = format!("{}\n", rdma.gid.interface_index);
    let mut entries = std::fs::read_dir("/sys/class/net").expect("interfaces").map_while(Result::ok);
    let found = entries.find(|entry| std::fs::read_to_string(entry.path().join("ifindex")).ok() == Some(index.clone()));
    found.expect("an interface with the GID's index").file_name().into_string().expect("a name")
}

#[test]
fn a_controller_matches_servers_and_clients() {
    let Some(rdma) = device() else { return };
    let (Some(address), Some(ours)) = (address(&rdma), Program::example("cmtime")) else { return };
    let (port, interface) = (free_port().to_string(), interface(&rdma));
    let arguments = ["-C", &address, "-p", &port, "-c", "10", "-P", "4", "-B", &interface];
    let controller = ours.start_with(&arguments);
    controller.wait_for("controller at");
    let servers = [(); 2].map(|()| ours.start_with(&[&arguments[..], &["-L"]].concat()));
    let client = ours.start_with(&arguments);
    for mut end in [controller, client].into_iter().chain(servers) {
        let text = expect_success(&mut end);
        // The controller is also a client. Each of the two clients makes ten connections to each of the two servers.
        let [table] = &tables(&text)[..] else { panic!("not one table:\n{text}") };
        assert!(table.with_queue_pairs && table.connections == 20 && table.total("cm connect") > 0, "{text}");
    }
}

#[test]
fn simulations_create_no_queue_pairs_and_sockets_can_be_measured() {
    let Some(rdma) = device() else { return };
    let (Some(address), Some(ours)) = (address(&rdma), Program::example("cmtime")) else { return };
    let port = free_port().to_string();
    let arguments = ["-c", "10", "-p", &port, "-m", "2000"];
    let mut serving = ours.start_with(&[&["-q", "50000"], &arguments[..]].concat());
    serving.wait_for("listening at");
    let text = expect_success(&mut ours.start_with(&[&["-s", &address], &arguments[..]].concat()));
    let [with_pauses, without] = &tables(&text)[..] else { panic!("not two tables:\n{text}") };
    assert!(!with_pauses.with_queue_pairs && with_pauses.total("create qp") >= 20_000, "{text}");
    assert!(!without.with_queue_pairs && without.total("create qp") < 20_000, "{text}");
    expect_success(&mut serving);

    let mut serving = ours.start_with(&["-S", "-c", "10", "-p", &port]);
    serving.wait_for("listening at");
    let text = expect_success(&mut ours.start_with(&["-S", "-c", "10", "-p", &port, "-s", "127.0.0.1"]));
    for text in [text, expect_success(&mut serving)] {
        let [table] = &tables(&text)[..] else { panic!("not one table:\n{text}") };
        assert!(table.connections == 10 && table.total("full connect") > 0, "{text}");
    }
}

#[test]
fn a_killed_or_mismatched_peer_is_an_error() {
    let Some(rdma) = device() else { return };
    let (Some(address), Some(ours)) = (address(&rdma), Program::example("cmtime")) else { return };
    let port = free_port().to_string();
    let refused = |running: &mut Running| {
        let (status, text) = running.finish();
        assert_eq!(status.code(), Some(1), "{text}");
        assert!(text.lines().any(|line| line.starts_with("cmtime: ")), "{text}");
        text
    };
    let many = ["-c", "50000", "-p", &port];
    let serving = ours.start_with(&many);
    serving.wait_for("listening at");
    let mut connecting = ours.start_with(&[&["-s", &address], &many[..]].concat());
    connecting.wait_for("Connecting 50000");
    drop(serving);
    refused(&mut connecting);

    let mut serving = ours.start_with(&["-c", "5", "-p", &port]);
    serving.wait_for("listening at");
    let mut connecting = ours.start_with(&["-s", &address, "-c", "3", "-p", &port, "-q", "50000"]);
    let text = refused(&mut serving);
    assert!(text.contains("made 3 connections instead of 5: give the same -c"), "{text}");
    let text = refused(&mut connecting);
    assert!(text.contains("another instance has ended"), "{text}");

    let text = refused(&mut ours.start_with(&["-s", &address, "-p", &port]));
    assert!(text.contains("nobody listens at the peer's port"), "{text}");
}
