//! Programs with two ends: those of librdmacm, libibverbs, perftest and libfabric.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::Tests;
use super::packages::Root;
use super::watch::Watch;
use crate::pair::{self, Ends, Ready};

/// What shows that the server is ready.
#[derive(Clone, Copy)]
enum Start {
    /// An id listens at the port.
    Listens,
    /// A TCP socket listens at the port.
    ListensByTcp,
    /// An id listens at this port. The program cannot change the port, so the server uses an address that nothing else uses.
    ListensAt(u16),
    /// The server has written this line. It runs under `stdbuf`, since it buffers what it writes to a pipe.
    Writes(&'static str),
}

/// A server and a client, each with its arguments. `PORT` stands for a free port, `OWN` for an address of these tests.
struct Case {
    server: &'static str,
    client: &'static str,
    start: Start,
    ends: Ends,
    /// Minimum number of bytes that one of them must send.
    bytes: u64,
    /// What server and client write at the end. A server that is killed has not written its buffer.
    said: [&'static str; 2],
}

impl Case {
    const fn new(server: &'static str, client: &'static str, bytes: u64) -> Case {
        Case { server, client, start: Start::Listens, ends: Ends::Itself, bytes, said: ["", ""] }
    }

    const fn start(self, start: Start) -> Case {
        Case { start, ..self }
    }

    const fn killed(self) -> Case {
        Case { ends: Ends::Killed, ..self }
    }

    const fn said(self, server: &'static str, client: &'static str) -> Case {
        Case { said: [server, client], ..self }
    }
}

const LIBRDMACM: [Case; 12] = [
    // Both ends print the texts, and the client compares them.
    Case::new(
        "rping -s -v -C 20 -S 4000 -a 127.0.0.1 -p PORT",
        "rping -c -v -V -C 20 -S 4000 -a 127.0.0.1 -p PORT",
        80_000,
    )
    .said("server ping data: rdma-ping-19: ", "ping data: rdma-ping-19: "),
    Case::new("rping -s -v -C 20 -q -a ::1 -p PORT", "rping -c -v -V -C 20 -q -a ::1 -p PORT", 1280)
        .said("server ping data: rdma-ping-19: ", "ping data: rdma-ping-19: "),
    Case::new("rping -s -P -p PORT", "rping -c -v -V -C 20 -a 127.0.0.1 -p PORT", 1280)
        .killed()
        .said("", "ping data: rdma-ping-19: "),
    Case::new("udaddy -b OWN -c 4 -C 20 -S 1000", "udaddy -s OWN -c 4 -C 20 -S 1000", 80_000)
        .start(Start::ListensAt(7174))
        .said("return status 0", "return status 0"),
    Case::new("udaddy -P ipoib -b OWN", "udaddy -P ipoib -s OWN", 1000)
        .start(Start::ListensAt(7174))
        .said("return status 0", "return status 0"),
    Case::new("ucmatose -m -c 4 -C 20 -S 5000 -p PORT", "ucmatose -m -c 4 -C 20 -S 5000 -p PORT -s 127.0.0.1", 400_000)
        .said("return status 0", "return status 0"),
    // Its server never ends. The connections exchange only messages of the connection manager: REQ, RTU, DREQ.
    Case::new("cmtime -c 100 -p PORT", "cmtime -c 100 -p PORT -s 127.0.0.1", 3 * 100 * 256)
        .killed()
        .said("", "destroy      :"),
    Case::new("stdbuf -oL mckey -m 239.1.2.3 -C 20 -S 1000", "mckey -s -m 239.1.2.3 -C 20 -S 1000", 20_000)
        .start(Start::Writes("joined dgid"))
        .said("return status 0", "return status 0"),
    Case::new("rdma_server -p PORT", "rdma_client -p PORT", 16).said("rdma_server: end 0", "rdma_client: end 0"),
    Case::new("rdma_server -p PORT -s ::1", "rdma_client -p PORT -s ::1", 16)
        .said("rdma_server: end 0", "rdma_client: end 0"),
    Case::new("rdma_xserver -p PORT", "rdma_xclient -p PORT", 16).said("rdma_xserver: end 0", "rdma_xclient: end 0"),
    Case::new("ucmatose -b 127.0.0.1 -p PORT", "ucmatose -f ip -p PORT -s 127.0.0.1", 1000)
        .said("return status 0", "return status 0"),
];

/// perftest, which exchanges addresses by TCP.
const PERFTEST: [Case; 8] = [
    Case::new("ib_send_bw -n 100 -p PORT", "ib_send_bw -n 100 -p PORT 127.0.0.1", 6_553_600),
    Case::new("ib_send_lat -n 100 -p PORT", "ib_send_lat -n 100 -p PORT 127.0.0.1", 200),
    Case::new("ib_write_bw -n 100 -p PORT", "ib_write_bw -n 100 -p PORT 127.0.0.1", 6_553_600),
    Case::new("ib_write_lat -n 100 -p PORT", "ib_write_lat -n 100 -p PORT 127.0.0.1", 200),
    Case::new("ib_read_bw -n 100 -p PORT", "ib_read_bw -n 100 -p PORT 127.0.0.1", 6_553_600),
    Case::new("ib_read_lat -n 100 -p PORT", "ib_read_lat -n 100 -p PORT 127.0.0.1", 200),
    Case::new("ib_atomic_bw -n 100 -p PORT", "ib_atomic_bw -n 100 -p PORT 127.0.0.1", 800),
    Case::new("ib_atomic_lat -n 100 -p PORT", "ib_atomic_lat -n 100 -p PORT 127.0.0.1", 800),
];

/// With `-R` the control connection is made by address, and then the queue pairs.
const PERFTEST_BY_ADDRESS: [Case; 9] = [
    Case::new("ib_send_bw -R -n 100 -p PORT", "ib_send_bw -R -n 100 -p PORT 127.0.0.1", 6_553_600),
    Case::new("ib_send_bw -R -q 4 -n 100 -p PORT", "ib_send_bw -R -q 4 -n 100 -p PORT 127.0.0.1", 26_214_400),
    Case::new("ib_send_lat -R -c UD -n 100 -p PORT", "ib_send_lat -R -c UD -n 100 -p PORT 127.0.0.1", 200),
    Case::new("ib_write_lat -R -n 100 -p PORT", "ib_write_lat -R -n 100 -p PORT 127.0.0.1", 200),
    Case::new("ib_write_bw -R -n 100 -p PORT", "ib_write_bw -R -n 100 -p PORT 127.0.0.1", 6_553_600),
    Case::new("ib_read_bw -R -n 100 -p PORT", "ib_read_bw -R -n 100 -p PORT 127.0.0.1", 6_553_600),
    Case::new("ib_read_lat -R -n 100 -p PORT", "ib_read_lat -R -n 100 -p PORT 127.0.0.1", 200),
    Case::new("ib_atomic_bw -R -n 100 -p PORT", "ib_atomic_bw -R -n 100 -p PORT 127.0.0.1", 800),
    Case::new("ib_atomic_lat -R -n 100 -p PORT", "ib_atomic_lat -R -n 100 -p PORT 127.0.0.1", 800),
];

/// The examples of libibverbs, which exchange addresses by TCP.
const PINGPONG: [Case; 4] = [
    Case::new("ibv_rc_pingpong -c -g 0 -p PORT", "ibv_rc_pingpong -c -g 0 -p PORT 127.0.0.1", 4_096_000),
    Case::new("ibv_uc_pingpong -c -g 0 -p PORT", "ibv_uc_pingpong -c -g 0 -p PORT 127.0.0.1", 4_096_000),
    Case::new(
        "ibv_ud_pingpong -c -g 0 -s 1000 -p PORT",
        "ibv_ud_pingpong -c -g 0 -s 1000 -p PORT 127.0.0.1",
        1_000_000,
    ),
    Case::new("ibv_srq_pingpong -c -g 0 -p PORT", "ibv_srq_pingpong -c -g 0 -p PORT 127.0.0.1", 4_096_000),
];

/// `-c` verifies the data. The layers `ofi_rxm` and `ofi_rxd` offer reliable datagrams over connections and over datagrams.
const LIBFABRIC: [Case; 4] = [
    Case::new("fi_pingpong -c -p verbs -e msg -B PORT", "fi_pingpong -c -p verbs -e msg -P PORT 127.0.0.1", 10 << 20),
    Case::new(
        "fi_pingpong -c -p verbs;ofi_rxm -e rdm -B PORT",
        "fi_pingpong -c -p verbs;ofi_rxm -e rdm -P PORT 127.0.0.1",
        10 << 20,
    ),
    Case::new(
        "fi_pingpong -c -p verbs;ofi_rxd -e rdm -B PORT",
        "fi_pingpong -c -p verbs;ofi_rxd -e rdm -P PORT 127.0.0.1",
        10 << 20,
    ),
    Case::new("fi_pingpong -c -p verbs -e dgram -B PORT", "fi_pingpong -c -p verbs -e dgram -P PORT 127.0.0.1", 40_000),
];

/// Programs that need what soft0 lacks, and what they write.
const REFUSED: [(&str, &str); 6] = [
    ("rstream", "rsockets"),
    ("riostream", "rsockets"),
    ("udpong", "rsockets"),
    ("rcopy", "rsockets"),
    ("rdma_xserver -c x", "Operation not supported"),
    ("ucmatose -P ib", "return status -1"),
];

pub(super) fn run(tests: &mut Tests) {
    let by_tcp = LIBFABRIC.into_iter().chain(PINGPONG).chain(PERFTEST).map(|case| case.start(Start::ListensByTcp));
    for case in LIBRDMACM.into_iter().chain(PERFTEST_BY_ADDRESS).chain(by_tcp) {
        tests.count(case.client, |root| case.run(root));
    }
    for (program, reason) in REFUSED {
        tests.count(&format!("{program} is refused"), |root| refused(root, program, reason));
    }
}

impl Case {
    fn run(&self, root: &Root) -> Result<()> {
        let (watch, port, own) = (Watch::new(root)?, pair::free_port()?, own_address());
        let end = |line: &str| -> Result<Command> {
            let line = line.replace("PORT", &port.to_string()).replace("OWN", &own);
            let mut command = command(root, &line)?;
            watch.of(&mut command);
            Ok(command)
        };
        let socket = match self.start {
            Start::ListensAt(port) => format!("/{port}/{own}"),
            _ => format!("/{port}/"),
        };
        let ready = match self.start {
            Start::Listens | Start::ListensAt(_) => Ready::Soft(&socket),
            Start::ListensByTcp => Ready::Tcp(port),
            Start::Writes(text) => Ready::Line(text),
        };
        let said = pair::output(ready, self.ends, end(self.server)?, end(self.client)?)?;
        for (lines, text) in said.iter().zip(self.said).filter(|(_, text)| !text.is_empty()) {
            ensure!(lines.iter().any(|line| line.contains(text)), "{text:?} is missing:\n{}", lines.join("\n"));
        }
        let processes = if self.ends == Ends::Killed { 1 } else { 2 };
        watch.check(self.client, processes, self.bytes)
    }
}

/// A loopback address for which other processes are unlikely to listen.
fn own_address() -> String {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    format!("127.77.{high}.{}", low.max(1))
}

fn command(root: &Root, line: &str) -> Result<Command> {
    let mut words = line.split_whitespace();
    let mut command = root.command(words.next().context("no program")?)?;
    command.args(words.map(|word| root.path_of(word)));
    Ok(command)
}

fn refused(root: &Root, line: &str, reason: &str) -> Result<()> {
    let output = command(root, line)?.stdin(Stdio::null()).output()?;
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    ensure!(!output.status.success(), "it succeeds:\n{text}");
    ensure!(text.contains(reason), "{reason:?} is missing:\n{text}");
    Ok(())
}
