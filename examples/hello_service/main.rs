//! A service that answers clients, which connect by IP address, and a client.

#![forbid(unsafe_code)]

mod service;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use common::{Result, device};
use rdma_safe::cm::Connector;

use service::Service;

const EXAMPLES: &str = "\
Examples:
  hello_service                    answer clients until Ctrl-C
  hello_service 10.0.0.2           send \"world\" to the service, and print the answer";

const TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of the longest message.
const MESSAGE: usize = 256;

/// Answers clients that connect by IP address; with an address, sends a message to such a service
#[derive(Debug, Parser)]
#[command(name = "hello_service", after_help = EXAMPLES, max_term_width = 100)]
struct Options {
    /// Address or name of the service
    address: Option<String>,

    /// Message to the service
    #[arg(default_value = "world")]
    message: String,

    /// Port of the service
    #[arg(short, long, value_name = "PORT", default_value_t = 7471)]
    port: u16,
}

fn main() -> ExitCode {
    common::main(|options: &Options| match &options.address {
        Some(address) => ask(address, options),
        None => Service::start(options.port)?.run(),
    })
}

/// Sends a message to the service, and prints the answer.
fn ask(address: &str, options: &Options) -> Result<()> {
    device::install_soft(None);
    let mut connection = Connector::new().connect((address, options.port))?;
    let pd = connection.pd().clone();
    // The service sends nothing before it has received the message.
    connection.receive(pd.allocate(MESSAGE)?)?;
    let mut message = pd.allocate(MESSAGE)?;
    message.fill_from(options.message.as_bytes())?;
    connection.send(message)?;
    // The send and the receive complete.
    for _ in 0..2 {
        let done = connection.wait(TIMEOUT)?.ok()?;
        if let Some(answer) = done.buffer.filter(|_| done.id.is_receive()) {
            println!("received {:?}", String::from_utf8_lossy(&answer));
        }
    }
    connection.disconnect()?;
    Ok(())
}
