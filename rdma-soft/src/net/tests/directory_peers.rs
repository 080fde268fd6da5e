//! The directory of listeners, between processes.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::directory::{SPACE, at, ip, new_port};
use super::spawn;
use crate::net::directory::{Claim, Directory, LookupError, test_names};
use crate::net::unix;

/// Address of a peer's device.
const DEVICE: &str = "127.66.1.2";

/// Set in a process that is a [`Peer`].
const PEER: &str = "RDMA_SOFT_TEST_PEER_OF_DIRECTORY";

/// Start of a line that a peer writes. The test harness writes other lines.
const REPLY: &str = "reply: ";

/// Another process with a directory. It executes commands, and answers lookups meanwhile.
struct Peer {
    process: Child,
    commands: ChildStdin,
    replies: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts a process that runs the test of this name, which calls [`test_with_peers`].
    fn start(test: &str) -> Peer {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([&*format!("net::tests::directory_peers::{test}"), "--exact", "--nocapture", "--test-threads=1"]);
        command.env(PEER, "1").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut process = spawn(&mut command).unwrap();
        let (commands, replies) = (process.stdin.take().unwrap(), BufReader::new(process.stdout.take().unwrap()));
        Peer { process, commands, replies }
    }

    fn tell(&mut self, command: &str) {
        writeln!(self.commands, "{command}").unwrap();
    }

    /// Returns the reply to the oldest command without one.
    fn reply(&mut self) -> String {
        let mut line = String::new();
        while self.replies.read_line(&mut line).unwrap() > 0 {
            if let Some(reply) = line.strip_prefix(REPLY) {
                return reply.trim().to_owned();
            }
            line.clear();
        }
        panic!("the peer has ended");
    }

    /// Executes a command and returns its reply.
    fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.reply()
    }

    fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended already.
        _ = self.process.kill();
        _ = self.process.wait();
    }
}

/// Runs a test, with a function that starts peers.
fn test_with_peers(name: &str, test: impl FnOnce(&dyn Fn() -> Peer)) {
    if std::env::var_os(PEER).is_some() {
        return serve();
    }
    test(&|| Peer::start(name));
}

/// Executes commands until there are no more.
fn serve() {
    let (mut directory, mut claims) = (Directory::new(1).unwrap(), Vec::<Claim>::new());
    let mut commands = BufReader::new(File::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap()));
    let (mut is_deaf, mut squatters) = (false, Vec::new());
    loop {
        let fds = [libc::STDIN_FILENO, if is_deaf { -1 } else { directory.fd().as_raw_fd() }];
        let mut fds = fds.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        let timeout = if commands.buffer().is_empty() { -1 } else { 0 };
        // SAFETY: the pointer and the length describe the array.
        unsafe { libc::poll(fds.as_mut_ptr(), 2, timeout) };
        if fds[1].revents != 0 {
            directory.handle_events(&[ip(DEVICE)], &mut |_| unreachable!("there are no lookups"));
        }
        if fds[0].revents == 0 && timeout != 0 {
            continue;
        }
        let mut line = String::new();
        if commands.read_line(&mut line).unwrap() == 0 {
            return;
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| words[at].parse::<u16>().unwrap();
        let reply = match words[0] {
            "claim" => match directory.claim(SPACE, at(words[1]), number(2)) {
                Ok(claim) => {
                    claims.push(claim);
                    claims.last().unwrap().port().to_string()
                }
                Err(error) => format!("error {}", error.errno()),
            },
            "listen" => format!("{:?}", claims.last_mut().unwrap().listen()),
            "drop" => format!("{:?}", claims.pop().map(|claim| claim.port())),
            "deaf" => {
                is_deaf = true;
                "deaf".to_owned()
            }
            "look_up" => format!("{:?}", look_up(&directory, words[1], number(2))),
            "connect" => format!("{:?}", connect(words[1], number(2))),
            "squat" => {
                let name = test_names::one(SPACE, number(2), ip(words[1]));
                let squatter = unix::bind(libc::SOCK_SEQPACKET, &name).unwrap();
                let listening = unix::listen(squatter.as_fd()).map_err(|error| error.kind());
                squatters.push(squatter);
                format!("{listening:?}")
            }
            "user" => {
                let user = number(1).into();
                // SAFETY: the arguments are numbers.
                assert_eq!(unsafe { libc::setresuid(user, user, user) }, 0);
                directory = Directory::new(1).unwrap();
                "user".to_owned()
            }
            other => panic!("{other}"),
        };
        println!("\n{REPLY}{reply}");
    }
}

/// Waits until a descriptor is readable.
fn wait(fd: std::os::fd::BorrowedFd<'_>) {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the array has one valid entry.
    assert_eq!(unsafe { libc::poll(&raw mut poll, 1, 60_000) }, 1, "no answer");
}

/// Looks up and waits for the result. Another process answers.
fn look_up(client: &Directory, address: &str, port: u16) -> Result<IpAddr, LookupError> {
    let _lookup = client.lookup(SPACE, ip(address), port)?;
    let mut result = None;
    while result.is_none() {
        wait(client.fd());
        client.handle_events(&[], &mut |event| result = Some(event.result.map(|process| process.address)));
    }
    result.unwrap()
}

/// Connects to a listener as a hostile client does. Returns the number of bytes that it gets.
fn connect(address: &str, port: u16) -> usize {
    let connection = unix::socket(libc::SOCK_SEQPACKET).unwrap();
    unix::connect(connection.as_fd(), &test_names::one(SPACE, port, ip(address))).unwrap();
    wait(connection.as_fd());
    let mut bytes = [0_u8; 64];
    // SAFETY: the pointer and the length describe the buffer.
    let len = unsafe { libc::recv(connection.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    usize::try_from(len).unwrap()
}

const IN_USE: i32 = libc::EADDRINUSE;
const OVERLAP: i32 = libc::EADDRNOTAVAIL;

#[test]
#[cfg_attr(miri, ignore = "it starts a process")]
fn claims_of_processes_conflict() {
    test_with_peers("claims_of_processes_conflict", |start| {
        let (mut peer, own) = (start(), Directory::new(1).unwrap());
        for (theirs, ours, expected) in [
            ("127.0.0.1", "127.0.0.1", Some(IN_USE)),
            ("127.0.0.1", "127.0.0.2", None),
            ("127.0.0.1", "0.0.0.0", Some(OVERLAP)),
            ("0.0.0.0", "127.0.0.1", Some(OVERLAP)),
            ("0.0.0.0", "0.0.0.0", Some(OVERLAP)),
            ("0.0.0.0", "::1", None),
            ("::", "127.0.0.1", Some(OVERLAP)),
            ("::1", "::", Some(OVERLAP)),
            ("127.0.0.1", "::", Some(OVERLAP)),
        ] {
            let port = new_port();
            assert_eq!(peer.ask(&format!("claim {theirs} {port}")), port.to_string());
            let claimed = own.claim(SPACE, at(ours), port).map_err(|error| error.errno());
            assert_eq!(claimed.as_ref().err(), expected.as_ref(), "{ours} after {theirs}");
            // The other way round, at another port: a process that is being started may still hold the names of this one.
            let port = new_port();
            let _ours = own.claim(SPACE, at(ours), port).unwrap();
            let expected = expected.map_or(port.to_string(), |errno| format!("error {errno}"));
            assert_eq!(peer.ask(&format!("claim {theirs} {port}")), expected, "{theirs} after {ours}");
        }
    });
}

#[test]
#[cfg_attr(miri, ignore = "it starts a process")]
fn each_listener_on_an_address_is_found_by_its_port() {
    test_with_peers("each_listener_on_an_address_is_found_by_its_port", |start| {
        let (mut peers, client) = ([start(), start()], Directory::new(1).unwrap());
        let ports = peers.each_mut().map(|peer| {
            let port: u16 = peer.ask("claim 127.0.0.1 0").parse().unwrap();
            assert!(
                matches!(look_up(&client, "127.0.0.1", port), Err(LookupError::NobodyListens)),
                "it does not listen"
            );
            assert_eq!(peer.ask("listen"), "Ok(())");
            port
        });
        assert_ne!(ports[0], ports[1]);
        for port in ports {
            assert_eq!(look_up(&client, "127.0.0.1", port).unwrap(), ip(DEVICE));
        }
        assert_eq!(peers[0].ask("drop"), format!("Some({})", ports[0]));
        assert!(matches!(look_up(&client, "127.0.0.1", ports[0]), Err(LookupError::NobodyListens)));
        assert_eq!(look_up(&client, "127.0.0.1", ports[1]).unwrap(), ip(DEVICE));
    });
}

#[test]
#[cfg_attr(miri, ignore = "it starts a process")]
fn a_killed_owner_frees_its_names_and_ends_lookups() {
    test_with_peers("a_killed_owner_frees_its_names_and_ends_lookups", |start| {
        let (client, mut next, port) = (Directory::new(1).unwrap(), start(), new_port());
        for address in ["127.0.0.1", "0.0.0.0", "::"] {
            let mut peer = start();
            peer.ask(&format!("claim {address} {port}"));
            peer.ask("listen");
            peer.ask("deaf");
            let lookups = [(); 20].map(|()| client.lookup(SPACE, ip("127.0.0.1"), port).unwrap());
            client.handle_events(&[], &mut |_| unreachable!("nobody has answered"));
            peer.kill();
            let mut ended = Vec::new();
            while ended.len() < lookups.len() {
                wait(client.fd());
                client.handle_events(&[], &mut |event| {
                    assert!(matches!(event.result, Err(LookupError::NobodyListens)), "{event:?}");
                    ended.push(event.lookup);
                });
            }
            ended.sort_unstable();
            assert_eq!(ended[..], lookups.each_ref().map(|lookup| lookup.number()));
            for free in ["127.0.0.1", "0.0.0.0", "::"] {
                assert_eq!(next.ask(&format!("claim {free} {port}")), port.to_string(), "{free} after {address}");
                next.ask("drop");
            }
        }
    });
}

#[test]
#[cfg_attr(miri, ignore = "it starts a process")]
fn only_listeners_of_the_same_user_and_of_root_are_found() {
    test_with_peers("only_listeners_of_the_same_user_and_of_root_are_found", |start| {
        if unix::own_user() != 0 {
            println!("skipped: only root can start processes of other users");
            return;
        }
        const USERS: [u16; 2] = [65_533, 65_532];
        let [mut root, mut one, mut other] = [(); 3].map(|()| start());
        one.ask(&format!("user {}", USERS[0]));
        other.ask(&format!("user {}", USERS[1]));
        let listen = |peer: &mut Peer| {
            let port = peer.ask("claim 127.0.0.1 0");
            assert_eq!(peer.ask("listen"), "Ok(())");
            port
        };
        let (of_root, of_one) = (listen(&mut root), listen(&mut one));
        let found = format!("Ok({DEVICE})");
        for peer in [&mut one, &mut other] {
            assert_eq!(peer.ask(&format!("look_up 127.0.0.1 {of_root}")), found);
        }
        let refused = format!("Err(OtherUser {{ uid: {} }})", USERS[0]);
        for peer in [&mut root, &mut other] {
            assert_eq!(peer.ask(&format!("look_up 127.0.0.1 {of_one}")), refused);
        }
        // A listener does not answer clients that ignore the rule.
        for peer in [&mut root, &mut other] {
            assert_eq!(peer.ask(&format!("connect 127.0.0.1 {of_one}")), "0");
        }
        assert_eq!(other.ask(&format!("connect 127.0.0.1 {of_root}")), "32");
        // Ports exclude each other between users, like the kernel's ports.
        assert_eq!(other.ask(&format!("claim 127.0.0.1 {of_one}")), format!("error {IN_USE}"));
        assert_eq!(other.ask(&format!("claim 0.0.0.0 {of_one}")), format!("error {OVERLAP}"));
        // A listener that binds the name of an address, without a claim, does not hide a listener at all addresses.
        let of_all = root.ask("claim 0.0.0.0 0");
        assert_eq!(root.ask("listen"), "Ok(())");
        assert_eq!(other.ask(&format!("squat 127.0.0.1 {of_all}")), "Ok(())");
        assert_eq!(one.ask(&format!("look_up 127.0.0.1 {of_all}")), found);
    });
}

#[test]
#[cfg_attr(miri, ignore = "it starts a process")]
fn processes_that_claim_at_the_same_time_get_different_ports() {
    test_with_peers("processes_that_claim_at_the_same_time_get_different_ports", |start| {
        let mut peers: Vec<Peer> = (0..4).map(|_| start()).collect();
        for address in ["127.0.0.1", "0.0.0.0", "::"] {
            // All processes have their commands before the first reply is read.
            for peer in &mut peers {
                (0..20).for_each(|_| peer.tell(&format!("claim {address} 0")));
            }
            let mut ports: Vec<String> = peers.iter_mut().flat_map(|peer| (0..20).map(|_| peer.reply())).collect();
            assert_eq!(ports.len(), 80);
            ports.sort_unstable();
            ports.dedup();
            assert_eq!(ports.len(), 80, "{address}");
            assert!(ports.iter().all(|port| port.parse::<u16>().is_ok()), "{ports:?}");
            peers.iter_mut().for_each(|peer| (0..20).for_each(|_| drop(peer.ask("drop"))));
        }
    });
}
