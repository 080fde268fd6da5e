//! `rdma-cat`: copies standard input and output, or files, between two hosts over RDMA.

#![forbid(unsafe_code)]

mod address;
mod failure;
mod options;
mod progress;
mod session;
mod signals;
mod sink;
mod source;

use std::process::ExitCode;
use std::time::Duration;

use rdma_async::Driver;
use rdma_msg::{Connector, Listener, Stream, StreamListener};

use failure::{Failure, Result};
use options::Options;
use progress::Progress;
use session::Session;
use signals::Signals;

/// Longest packet in bytes.
const PACKET: usize = 256 << 10;

/// Most packets on their way in a direction.
const WINDOW: u32 = 16;

/// Longest wait for the peer to confirm the end of the connection.
const CLOSE: Duration = Duration::from_secs(10);

/// Longest wait for the peer to learn that this end has failed.
const ABORT: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let options = Options::parse();
    rdma_safe::soft::install_by_default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let ended = match runtime {
        Ok(runtime) => runtime.block_on(run(&options)),
        Err(error) => Err(Failure::local("cannot start", error)),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Interrupted(signal)) => ExitCode::from(128 + signal),
        Err(failure) => {
            failure.print();
            ExitCode::FAILURE
        }
    }
}

async fn run(options: &Options) -> Result<()> {
    let signals = Signals::install().map_err(|error| Failure::local("cannot handle signals", error))?;
    let (driver, runner) = Driver::builder().build().map_err(|error| Failure::local("cannot start", error))?;
    let driving = tokio::spawn(runner.run_tokio());
    let ended = match options.listen {
        true => serve(options, driver, signals).await,
        false => connect(options, driver, signals).await,
    };
    // The driver ends when the peer has confirmed the end of the connection. If this end leaves earlier, the peer may miss that its
    // last bytes were received.
    let limit = if ended.is_ok() { CLOSE } else { ABORT };
    let _ = tokio::time::timeout(limit, driving).await;
    ended
}

async fn connect(options: &Options, driver: Driver, mut signals: Signals) -> Result<()> {
    let mut session = Session::new(options)?;
    let peer = &options.address;
    let connector =
        Connector::with_driver(&driver).packet_size(PACKET).window(WINDOW).sends(WINDOW).timeout(options.timeout);
    let connecting = tokio::time::timeout(options.timeout, connector.connect_stream(peer.to_string()));
    let stream = match signals.unless(connecting).await? {
        Ok(connected) => connected.map_err(|error| Failure::connection(format!("cannot connect to {peer}"), error))?,
        Err(_) => {
            let within = options.timeout.as_secs_f64();
            return Err(Failure::Connection(format!("cannot connect to {peer}: no answer within {within} s")));
        }
    };
    session.run(stream, &mut signals).await
}

async fn serve(options: &Options, driver: Driver, mut signals: Signals) -> Result<()> {
    let mut session = Session::new(options)?;
    let address = &options.address;
    let builder = Listener::builder().driver(&driver).packet_size(PACKET).window(WINDOW).sends(WINDOW);
    let binding = signals.unless(builder.bind_streams(address.to_string())).await?;
    let listener = binding.map_err(|error| Failure::connection(format!("cannot listen at {address}"), error))?;
    if !options.quiet {
        eprintln!("listening at {}", listener.local_address());
    }
    if !options.keep {
        let stream = accept(&listener, &mut signals).await?;
        // Further peers are rejected.
        drop(listener);
        return session.run(stream, &mut signals).await;
    }
    loop {
        let stream = accept(&listener, &mut signals).await?;
        match session.run(stream, &mut signals).await {
            Ok(()) => {}
            Err(interrupted @ Failure::Interrupted(_)) => return Err(interrupted),
            Err(failure) => failure.print(),
        }
    }
}

async fn accept(listener: &StreamListener, signals: &mut Signals) -> Result<Stream> {
    signals.unless(listener.accept()).await?.map_err(|error| Failure::connection("cannot accept", error))
}

/// The progress bars that the options ask for.
pub(crate) fn progress(options: &Options) -> Progress {
    use std::io::IsTerminal;
    let has_file = options.send.is_some() || options.receive.is_some();
    Progress::new(options.progress || (!options.quiet && has_file && std::io::stderr().is_terminal()))
}
