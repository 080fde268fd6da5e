//! The examples `kv_server` and `kv_client`: a key-value service on rdma-async.

use std::net::SocketAddr;
use std::time::Duration;

use rdma_async::{Connector, Driver, Threads};

use crate::cm::address;
use crate::support::program::{Program, Running, free_port};
use crate::support::random::Random;
use crate::support::{DEADLINE, Rdma, device, within_deadline};

/// A running service, at the device's address.
struct Service {
    running: Running,
    client: Program,
    address: SocketAddr,
    /// Limits the time of the test.
    rdma: Rdma,
}

impl Service {
    /// `None` after printing why the test is skipped.
    fn start() -> Option<Service> {
        let rdma = device()?;
        let address = address(&rdma)?;
        let (server, client) = (Program::example("kv_server")?, Program::example("kv_client")?);
        let address = SocketAddr::from((address, free_port()));
        let running = server.start_with(&[&address.to_string()]);
        running.wait_for("listening at");
        Some(Service { running, client, address, rdma })
    }

    fn client(&self, arguments: &[&str]) -> Running {
        self.client.start_with(&[&["--server", &self.address.to_string()], arguments].concat())
    }

    /// The output of a client that succeeds.
    #[track_caller]
    fn output(&self, arguments: &[&str]) -> String {
        let (status, text) = self.client(arguments).finish();
        assert!(status.success(), "{arguments:?}: {status}\n{text}");
        text
    }

    /// Sends SIGINT, after which the service must end with success. Returns its output.
    #[track_caller]
    fn stop(mut self) -> String {
        // SAFETY: the child was not waited for yet, so the process number is its own.
        assert_eq!(unsafe { libc::kill(self.running.id() as i32, libc::SIGINT) }, 0);
        let (status, text) = self.running.finish_within(DEADLINE);
        assert!(status.success(), "{status}\n{text}");
        text
    }
}

#[test]
fn values_are_stored_and_read() {
    let Some(service) = Service::start() else { return };
    let (status, text) = service.client(&["get", "color"]).finish();
    assert!(!status.success() && text.contains("no such key"), "{status}\n{text}");
    for value in ["red", "blue", ""] {
        assert_eq!(service.output(&["set", "color", value]), "");
        assert_eq!(service.output(&["get", "color"]), format!("{value}\n"));
    }
    let long = "x".repeat(4000);
    service.output(&["set", "long", &long]);
    assert_eq!(service.output(&["get", "long"]), format!("{long}\n"));
    let text = service.stop();
    // The network may lose what the last client says when it leaves.
    assert!(text.contains("clients, 2 keys"), "{text}");
}

#[test]
fn clients_that_are_killed_do_not_affect_others() {
    let Some(service) = Service::start() else { return };
    service.output(&["set", "color", "red"]);
    // An emulated machine is slower.
    let requests = if service.rdma.is_soft() { "1000" } else { "300" };
    let mut staying: Vec<_> = (0..3).map(|_| service.client(&["load", requests])).collect();
    let mut random = Random::new(1);
    for _ in 0..3 {
        let mut killed: Vec<_> = (0..2).map(|_| service.client(&["load", "1000000000"])).collect();
        for client in &mut killed {
            std::thread::sleep(Duration::from_millis(random.below(100)));
            client.kill();
        }
        assert_eq!(service.output(&["get", "color"]), "red\n");
    }
    for client in &mut staying {
        let (status, text) = client.finish();
        assert!(status.success() && text.contains("requests/s"), "{status}\n{text}");
    }
    let text = service.stop();
    assert!(text.contains("101 keys"), "{text}");
}

#[test]
fn a_signal_stops_the_service_while_clients_are_connected() {
    let Some(service) = Service::start() else { return };
    let mut busy: Vec<_> = (0..2).map(|_| service.client(&["load", "1000000000"])).collect();
    // A client that is idle when the service stops. Its driver runs.
    let connector = Connector::with_driver(&Driver::thread().unwrap());
    let (_, mut runner) = Driver::builder().build::<Threads>().unwrap();
    let idle = runner.block_on(connector.connect(service.address)).unwrap();
    // The busy clients have stored their keys.
    within_deadline("a value", || {
        let (status, _) = service.client(&["get", "key99"]).finish();
        status.success().then_some(())
    });
    let text = service.stop();
    assert!(text.contains("100 keys"), "{text}");
    assert!(runner.block_on(idle.receive()).unwrap().is_none(), "the service has ended the connection");
    for client in &mut busy {
        let (status, text) = client.finish();
        assert!(!status.success(), "{text}");
        assert!(text.contains("the server has left") || text.contains("Disconnected"), "{text}");
    }
}
