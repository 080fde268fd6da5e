//! The client of `http_server`: `http_client http://ADDRESS/PATH [--post BYTES]`.

use std::error::Error;
use std::time::Instant;

use clap::Parser;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Request, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use rdma_msg::hyper::{ConnectInfo, UriConnector, client_windows};

/// An HTTP client over RDMA.
#[derive(Parser)]
#[command(version)]
struct Options {
    /// URI to request.
    #[arg(default_value = "http://127.0.0.1:7471/")]
    uri: Uri,
    /// Sends a body of this length, instead of printing the response.
    #[arg(long, value_name = "BYTES")]
    post: Option<usize>,
    /// Uses HTTP/1.1 instead of HTTP/2.
    #[arg(long)]
    http1: bool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    rdma_safe::soft::install_by_default();
    let mut builder = Client::builder(TokioExecutor::new());
    let client = client_windows(&mut builder).http2_only(!options.http1).build(UriConnector::new()?);

    let body = Bytes::from(vec![b'x'; options.post.unwrap_or(0)]);
    let method = if options.post.is_some() { "POST" } else { "GET" };
    let start = Instant::now();
    let request = Request::builder().method(method).uri(options.uri).body(Full::new(body.clone()))?;
    let response = client.request(request).await?;
    if let Some(ConnectInfo { peer: Some(peer), .. }) = response.extensions().get() {
        println!("{:?} {} from {peer}", response.version(), response.status());
    }
    let reply = response.into_body().collect().await?.to_bytes();
    if options.post.is_none() {
        println!("{}", String::from_utf8_lossy(&reply).trim_end());
    } else if reply == body {
        let time = start.elapsed();
        println!("{} bytes in each direction, {:.1} MB/s", reply.len(), reply.len() as f64 / time.as_secs_f64() / 1e6);
    } else {
        return Err("the reply differs from the request".into());
    }
    Ok(())
}
