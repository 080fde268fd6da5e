//! Synchronization of the instances over TCP, with the messages of the C program.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpListener, TcpStream};
use std::time::Duration;

use common::Result;

use crate::table::Step;
use crate::{TICK, address_of};

/// Timeout of a TCP connection to another instance.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The instances that this one synchronizes with.
#[derive(Debug)]
pub(crate) enum Peers {
    /// None: the C program of rdma-core before 52 does not synchronize.
    None,
    /// This instance is the controller of the others.
    Controller(Vec<TcpStream>),
    /// Connection to the controller.
    Controlled(TcpStream),
}

impl Peers {
    pub(crate) fn controlled_by(address: SocketAddr) -> std::io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)?;
        Ok(Peers::Controlled(configure(stream)?))
    }

    /// Waits for `count` others to connect.
    pub(crate) fn accept(listener: &TcpListener, count: usize) -> std::io::Result<Self> {
        let accepted = (0..count).map(|_| configure(listener.accept()?.0));
        Ok(Peers::Controller(accepted.collect::<std::io::Result<_>>()?))
    }

    fn streams(&self) -> &[TcpStream] {
        match self {
            Peers::None => &[],
            Peers::Controller(streams) => streams,
            Peers::Controlled(stream) => std::slice::from_ref(stream),
        }
    }

    /// Waits until all instances have reached `step`. Calls `check` in between; its error ends the wait.
    pub(crate) fn reach(&self, step: Step, check: impl Fn() -> Result<()>) -> Result<()> {
        if let Peers::Controlled(controller) = self {
            write(controller, &[step as u8])?;
        }
        for stream in self.streams() {
            let mut theirs = [0];
            read(stream, &mut theirs, &check)?;
            if theirs[0] != step as u8 {
                return Err(format!("another instance is at step {}, this one at {}", theirs[0], step as u8).into());
            }
        }
        if let Peers::Controller(others) = self {
            for other in others {
                write(other, &[step as u8])?;
            }
        }
        Ok(())
    }

    /// Whether another instance is already waiting at the next step. Fails if one has ended.
    pub(crate) fn is_waited_for(&self) -> Result<bool> {
        let mut is_waiting = false;
        for stream in self.streams() {
            stream.set_nonblocking(true)?;
            let peeked = stream.peek(&mut [0]);
            stream.set_nonblocking(false)?;
            match peeked {
                Ok(0) => return Err(ended()),
                Ok(_) => is_waiting = true,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(io_error(error)),
            }
        }
        Ok(is_waiting)
    }

    /// Exchanges the roles and addresses of all instances. Returns them in the order of the controller, which comes first.
    pub(crate) fn introduce(&self, own: Member, count: usize) -> Result<Vec<Member>> {
        let mut all = vec![0; count * Member::LEN];
        match self {
            Peers::None => {}
            Peers::Controller(others) => {
                all[..Member::LEN].copy_from_slice(&own.encode());
                for (other, member) in others.iter().zip(all[Member::LEN..].chunks_mut(Member::LEN)) {
                    read(other, member, || Ok(()))?;
                }
                for other in others {
                    write(other, &all)?;
                }
            }
            Peers::Controlled(controller) => {
                write(controller, &own.encode())?;
                read(controller, &mut all, || Ok(()))?;
            }
        }
        all.chunks(Member::LEN).map(Member::decode).collect()
    }
}

fn configure(stream: TcpStream) -> std::io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TICK))?;
    Ok(stream)
}

fn ended() -> Box<dyn std::error::Error + Send + Sync> {
    "another instance has ended".into()
}

/// Fills `buffer`, without a limit of time.
fn read(mut stream: &TcpStream, buffer: &mut [u8], check: impl Fn() -> Result<()>) -> Result<()> {
    let mut done = 0;
    while done < buffer.len() {
        match stream.read(&mut buffer[done..]) {
            Ok(0) => return Err(ended()),
            Ok(count) => done += count,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => check()?,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(io_error(error)),
        }
    }
    Ok(())
}

fn write(mut stream: &TcpStream, bytes: &[u8]) -> Result<()> {
    stream.write_all(bytes).map_err(io_error)
}

/// Converts an I/O error. An instance that ends with bytes unread resets the connection.
fn io_error(error: std::io::Error) -> Box<dyn std::error::Error + Send + Sync> {
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => ended(),
        _ => error.into(),
    }
}

/// The listener of the controller. `None` if the address is of another host or in use.
fn control(controller: SocketAddr) -> Result<Option<TcpListener>> {
    match TcpListener::bind(controller) {
        Ok(listener) => Ok(Some(listener)),
        Err(error) if matches!(error.kind(), ErrorKind::AddrNotAvailable | ErrorKind::AddrInUse) => Ok(None),
        Err(error) => Err(format!("cannot listen at {controller}: {error}").into()),
    }
}

/// Connects all instances. The first one that starts on the controller's host is the controller.
pub(crate) fn gather(controller: &str, port: u16, count: usize) -> Result<Peers> {
    let address = address_of(controller, port, None)?;
    if let Some(listener) = control(address)? {
        println!("cmtime: controller at {address}");
        return Ok(Peers::accept(&listener, count - 1)?);
    }
    Peers::controlled_by(address)
        .map_err(|error| format!("no controller at {address}: {error}; start the instance there first").into())
}

/// Role and address of an instance: the C program's `struct peer_info`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Member {
    /// Address that it listens on, if it does.
    pub(crate) address: Option<SocketAddr>,
    pub(crate) listens: bool,
}

impl Member {
    /// Length of the message: a `struct sockaddr_storage`, a number, and padding.
    const LEN: usize = 136;
    const ROLE: usize = 128;
    const AF_INET: u16 = 2;
    const AF_INET6: u16 = 10;

    fn encode(self) -> [u8; Member::LEN] {
        let mut bytes = [0; Member::LEN];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        put(Member::ROLE, &u32::from(self.listens).to_ne_bytes());
        match self.address {
            None => {}
            Some(SocketAddr::V4(address)) => {
                put(0, &Member::AF_INET.to_ne_bytes());
                put(2, &address.port().to_be_bytes());
                put(4, &address.ip().octets());
            }
            Some(SocketAddr::V6(address)) => {
                put(0, &Member::AF_INET6.to_ne_bytes());
                put(2, &address.port().to_be_bytes());
                put(4, &address.flowinfo().to_be_bytes());
                put(8, &address.ip().octets());
                put(24, &address.scope_id().to_ne_bytes());
            }
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<Self> {
        fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
            std::array::from_fn(|index| bytes[at + index])
        }
        let port = u16::from_be_bytes(part(bytes, 2));
        let address = match u16::from_ne_bytes(part(bytes, 0)) {
            0 => None,
            Member::AF_INET => Some((Ipv4Addr::from(part::<4>(bytes, 4)), port).into()),
            Member::AF_INET6 => {
                let (flow, scope) = (u32::from_be_bytes(part(bytes, 4)), u32::from_ne_bytes(part(bytes, 24)));
                Some(SocketAddrV6::new(Ipv6Addr::from(part::<16>(bytes, 8)), port, flow, scope).into())
            }
            family => return Err(format!("an instance has an address of the unknown family {family}").into()),
        };
        Ok(Member { address, listens: u32::from_ne_bytes(part(bytes, Member::ROLE)) == 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_encoded_in_the_layout_of_c() {
        let v4 = Member { address: Some(([10, 0, 0, 2], 0x1d2f).into()), listens: true };
        let bytes = v4.encode();
        assert_eq!(bytes[..8], [2, 0, 0x1d, 0x2f, 10, 0, 0, 2]);
        assert_eq!(bytes[128..132], 1_u32.to_ne_bytes());
        let v6 = SocketAddrV6::new(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1), 7, 5, 2);
        for member in
            [v4, Member { address: Some(v6.into()), listens: false }, Member { address: None, listens: false }]
        {
            assert_eq!(Member::decode(&member.encode()).unwrap(), member);
        }
        let mut other = bytes;
        other[0] = 27;
        assert!(Member::decode(&other).unwrap_err().to_string().contains("family 27"));
    }

    /// A controller and two others.
    fn three() -> [Peers; 3] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let [first, second] = [(); 2].map(|()| Peers::controlled_by(address).unwrap());
        [Peers::accept(&listener, 2).unwrap(), first, second]
    }

    #[test]
    fn instances_wait_for_each_other_and_exchange_their_roles() {
        let [controller, first, second] = three();
        std::thread::scope(|scope| {
            let others: Vec<_> = [first, second]
                .into_iter()
                .map(|peers| {
                    scope.spawn(move || {
                        peers.reach(Step::Connect, || Ok(())).unwrap();
                        peers.introduce(Member { address: None, listens: false }, 3).unwrap()
                    })
                })
                .collect();
            controller.reach(Step::Connect, || Ok(())).unwrap();
            let own = Member { address: Some(([10, 0, 0, 2], 7).into()), listens: true };
            let members = controller.introduce(own, 3).unwrap();
            assert_eq!(members.iter().map(|member| member.listens).collect::<Vec<_>>(), [true, false, false]);
            for other in others {
                assert_eq!(other.join().unwrap(), members);
            }
        });
    }

    #[test]
    fn another_step_or_a_closed_connection_is_an_error() {
        let [controller, first, second] = three();
        assert!(!controller.is_waited_for().unwrap());
        (&first.streams()[0]).write_all(&[3]).unwrap();
        (&second.streams()[0]).write_all(&[0]).unwrap();
        let error = controller.reach(Step::FullConnect, || Ok(())).unwrap_err();
        assert_eq!(error.to_string(), "another instance is at step 3, this one at 0");
        drop((first, second));
        assert_eq!(controller.is_waited_for().unwrap_err().to_string(), "another instance has ended");
    }

    #[test]
    fn a_failed_check_ends_the_wait() {
        let [controller, _first, _second] = three();
        let error = controller.reach(Step::Connect, || Err("failed".into())).unwrap_err();
        assert_eq!(error.to_string(), "failed");
    }
}
