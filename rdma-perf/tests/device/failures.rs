//! Errors of a client whose server is missing, killed, or another program.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Duration;

use rustix::process::Signal;

use crate::support::{DEADLINE, device};

#[test]
fn a_client_notices_that_its_server_was_killed() {
    let Some(rdma) = device() else { return };
    for (test, options) in [
        ("send bw", "--duration 600s --yield"),
        ("write bw", "--duration 600s --yield"),
        ("write lat", "--duration 600s --yield"),
        ("read lat", "--duration 600s --events"),
        ("send lat", "--compat perftest --events --iters 10000000"),
        ("write lat", "--compat perftest --iters 10000000 --yield"),
    ] {
        let server = rdma.server("");
        let client = rdma.start(&server.client(test, &format!("--size 64 --timeout 2s {options}")));
        client.wait_for_error("MTU");
        std::thread::sleep(Duration::from_millis(100));
        server.running.signal(Signal::KILL);
        let output = client.output_within(DEADLINE);
        let errors = output.failure(1, &["rdma-perf: "]);
        assert!(errors.lines().last().is_some_and(|line| line.contains("peer")), "{test}: {errors}");
    }
}

#[test]
fn a_server_that_is_another_program_is_an_error() {
    let Some(rdma) = device() else { return };
    for (answer, error) in [
        (&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], "does not speak the protocol"),
        (b"", "closed the control connection"),
        (b"\x02\0\0\0{}", "another program"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let other = std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            // Reads the whole request, so that closing does not reset the connection.
            let mut len = [0; 4];
            stream.read_exact(&mut len).unwrap();
            std::io::copy(&mut (&stream).take(u32::from_le_bytes(len).into()), &mut std::io::sink()).unwrap();
            stream.write_all(answer).unwrap();
        });
        rdma.run(&format!("write bw 127.0.0.1 --port {port}")).failure(1, &[error]);
        other.join().unwrap();
    }
}

#[test]
fn a_missing_server_is_an_error_with_advice() {
    let Some(rdma) = device() else { return };
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    rdma.run(&format!("write bw 127.0.0.1 --port {port}")).failure(1, &["run `rdma-perf server`"]);
}

#[test]
fn a_port_in_use_is_an_error_with_advice() {
    let Some(rdma) = device() else { return };
    let taken = TcpListener::bind("[::]:0").or_else(|_| TcpListener::bind("0.0.0.0:0")).unwrap();
    let port = taken.local_addr().unwrap().port();
    rdma.run(&format!("server --port {port}")).failure(1, &["is another server running?"]);
}
