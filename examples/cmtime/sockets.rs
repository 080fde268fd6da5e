//! The same steps with TCP connections, for comparison.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::Result;

use crate::table::{Step, Times, table};
use crate::{Options, address_of};

pub(crate) fn run(options: &Options, server: Option<&str>) -> Result<()> {
    match server {
        Some(server) => client(options, address_of(server, options.port, None)?),
        None => serve(options),
    }
}

fn serve(options: &Options) -> Result<()> {
    let own = options.source()?.unwrap_or((Ipv4Addr::UNSPECIFIED, 0).into());
    let listener = TcpListener::bind((own.ip(), options.port))?;
    println!("cmtime: listening at {}", listener.local_addr()?);
    let (mut times, mut streams) = (Times::default(), Vec::new());
    for _ in 0..options.connections {
        let (stream, _) = listener.accept()?;
        if streams.is_empty() {
            times.begin(Step::FullConnect);
        }
        streams.push(stream);
    }
    times.end(Step::FullConnect);
    times.begin(Step::DestroyId);
    let each = vec![Times::default(); streams.len()];
    drop(streams);
    times.end(Step::DestroyId);
    print!("By TCP:\n{}", table(false, options.threads as usize, &times, &each));
    Ok(())
}

fn client(options: &Options, server: SocketAddr) -> Result<()> {
    let connections: Vec<_> = (0..options.connections).map(|_| Mutex::new((Times::default(), None))).collect();
    let next = AtomicUsize::new(0);
    let connect = || -> Result<()> {
        // One call creates the socket and connects it.
        while let Some(connection) = connections.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut connection = connection.lock().map_err(|_| "a thread has panicked")?;
            connection.0.begin(Step::Connect);
            let stream = TcpStream::connect(server).map_err(|error| format!("connecting to {server}: {error}"))?;
            connection.0.end(Step::Connect);
            connection.1 = Some(stream);
        }
        Ok(())
    };
    let mut times = Times::default();
    times.begin(Step::FullConnect);
    times.begin(Step::Connect);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..options.threads).map(|_| scope.spawn(connect)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a thread has panicked")?)
    })?;
    times.end(Step::Connect);
    times.end(Step::FullConnect);
    let (each, streams): (Vec<_>, Vec<_>) =
        connections.into_iter().filter_map(|connection| connection.into_inner().ok()).unzip();
    times.begin(Step::DestroyId);
    drop(streams);
    times.end(Step::DestroyId);
    print!("By TCP:\n{}", table(false, options.threads as usize, &times, &each));
    Ok(())
}
