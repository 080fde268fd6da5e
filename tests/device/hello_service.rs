//! The example `hello_service`: a service for many clients.

use rdma_safe::WcStatus;
use rdma_safe::cm::{Connection, Connector};

use crate::cm::address;
use crate::support::program::{Program, Running, free_port};
use crate::support::{DEADLINE, device, error_of, filled, within_deadline};

/// A running service, at the device's address.
struct Service {
    program: Program,
    running: Running,
    address: String,
    port: u16,
}

impl Service {
    /// `None` after printing why the test is skipped.
    fn start() -> Option<Service> {
        let address = address(&device()?)?.to_string();
        let program = Program::example("hello_service")?;
        let port = free_port();
        let running = program.start_with(&["-p", &port.to_string()]);
        running.wait_for("listening at");
        Some(Service { program, running, address, port })
    }

    fn connect(&self) -> Connection {
        Connector::new().connect((&*self.address, self.port)).unwrap()
    }

    fn send_signal(&self) {
        // SAFETY: the child was not waited for yet, so the process number is its own.
        assert_eq!(unsafe { libc::kill(self.running.id() as i32, libc::SIGTERM) }, 0);
    }

    /// Checks that the service ends with success. Returns its output.
    #[track_caller]
    fn finish(mut self) -> String {
        let (status, text) = self.running.finish();
        assert!(status.success(), "{status}\n{text}");
        text
    }
}

/// Sends a message, and checks the answer.
#[track_caller]
fn exchange(client: &mut Connection, message: &[u8], answer: &[u8]) {
    let inbox = client.pd().allocate(512).unwrap();
    client.receive(inbox).unwrap();
    let outbox = filled(client.pd(), message);
    client.send(outbox).unwrap();
    let done = [(); 2].map(|()| client.wait(DEADLINE).unwrap().ok().unwrap());
    let received = done.into_iter().find(|done| done.id.is_receive()).expect("an answer");
    assert_eq!(received.buffer.as_deref(), Some(answer));
}

#[test]
fn the_service_answers_each_client_and_stops_after_a_signal() {
    let Some(service) = Service::start() else { return };
    let mut client = service.connect();
    exchange(&mut client, b"first", b"hello, first");
    // More messages than the service has receives.
    for number in 0..1500 {
        exchange(&mut client, format!("{number}").as_bytes(), format!("hello, {number}").as_bytes());
    }
    let mut other = service.program.start_with(&[&service.address, "Ada", "-p", &service.port.to_string()]);
    let (status, text) = other.finish();
    assert!(status.success() && text.contains(r#"received "hello, Ada""#), "{status}\n{text}");
    service.running.wait_for(": disconnected\n");
    exchange(&mut client, b"again", b"hello, again");
    service.send_signal();
    within_deadline("the disconnect", || (!client.is_connected().unwrap()).then_some(()));
    let text = service.finish();
    assert_eq!(text.matches(": connected\n").count(), 2, "{text}");
    assert_eq!(text.matches(": disconnected by the service\n").count(), 1, "{text}");
}

#[test]
fn an_error_of_one_client_does_not_affect_the_others() {
    let Some(service) = Service::start() else { return };
    let mut client = service.connect();
    // The longest answer, and a message that is too long.
    exchange(&mut client, &[b'x'; 256], &[b"hello, ", &[b'x'; 249][..]].concat());
    let mut talkative = service.connect();
    let outbox = filled(talkative.pd(), &[b'x'; 257]);
    talkative.send(outbox).unwrap();
    let failed = error_of(talkative.wait(DEADLINE).unwrap().ok());
    // SoftRoCE reports a message that is too long for a shared receive as the peer's own error.
    assert!([WcStatus::REM_INV_REQ_ERR, WcStatus::REM_OP_ERR].contains(&failed.0.status), "{failed}");
    within_deadline("the disconnect", || (!talkative.is_connected().unwrap()).then_some(()));
    exchange(&mut client, b"and I", b"hello, and I");
    client.disconnect().unwrap();
    service.send_signal();
    let text = service.finish();
    assert!(text.contains("local length error"), "{text}");
}

#[test]
fn a_client_that_takes_no_answer_does_not_delay_the_stop_for_ever() {
    let Some(service) = Service::start() else { return };
    let mut client = service.connect();
    let outbox = filled(client.pd(), b"anyone");
    client.send(outbox).unwrap();
    let _ = client.wait(DEADLINE).unwrap().ok().unwrap();
    service.running.wait_for(": connected\n");
    service.send_signal();
    service.finish();
    within_deadline("the disconnect", || (!client.is_connected().unwrap()).then_some(()));
}
