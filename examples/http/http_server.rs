//! An HTTP server over RDMA: `http_server [ADDRESS]`. It sends each request body back. Ctrl-C stops it gracefully.

use std::convert::Infallible;
use std::error::Error;

use clap::Parser;
use http_body_util::{Either, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use rdma_msg::StreamListener;
use rdma_msg::hyper::server_windows;

/// An HTTP server over RDMA.
#[derive(Parser)]
#[command(version)]
struct Options {
    /// Address to listen at.
    #[arg(default_value = "0.0.0.0:7471")]
    address: String,
}

type Reply = Response<Either<Full<Bytes>, Incoming>>;

async fn answer(request: Request<Incoming>) -> Result<Reply, Infallible> {
    let body = match *request.method() {
        // Frames are sent back as they arrive.
        Method::POST | Method::PUT => Either::Right(request.into_body()),
        _ => Either::Left(Full::from(format!("{:?} {} over RDMA\n", request.version(), request.uri().path()))),
    };
    Ok(Response::new(body))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    rdma_safe::soft::install_by_default();
    let listener = StreamListener::bind(&options.address).await?;
    println!("listening at http://{}", listener.local_address());
    let mut incoming = listener.incoming().on_error(|error| eprintln!("a connection was not accepted: {error}"));
    let mut builder = auto::Builder::new(TokioExecutor::new());
    server_windows(&mut builder);
    let graceful = GracefulShutdown::new();
    loop {
        let stream = tokio::select! {
            stream = incoming.next() => stream,
            interrupted = tokio::signal::ctrl_c() => break interrupted?,
        };
        let Some(stream) = stream.transpose()? else { break };
        let connection = builder.serve_connection(TokioIo::new(stream), service_fn(answer)).into_owned();
        // Its error is dropped: a client that exits without closing its connection is one.
        tokio::spawn(graceful.watch(connection));
    }
    drop(incoming);
    graceful.shutdown().await;
    Ok(())
}
