//! `cargo xtask demo`: exchanges messages between two processes over RDMA.

use std::time::Instant;

use anyhow::{Result, bail};

use crate::pair::End;
use crate::pingpong::{self, Program};
use crate::softroce::{self, Options, Sink};

/// Build the example rc_pingpong and run it as server and client over SoftRoCE
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    softroce: Options,
    /// Program for the server
    #[arg(long, default_value = "rust", value_name = "PROGRAM")]
    server: Program,
    /// Program for the client
    #[arg(long, default_value = "rust", value_name = "PROGRAM")]
    client: Program,
    /// Options for both programs, such as `-e` for events or `-s 65536` for the message size
    #[arg(last = true, value_name = "OPTIONS")]
    options: Vec<String>,
}

pub(crate) fn main(args: &Args) -> Result<i32> {
    let started = Instant::now();
    if [args.server, args.client].contains(&Program::Rust) {
        println!("building the example rc_pingpong …");
        pingpong::build()?;
        println!("built after {:.1} s", started.elapsed().as_secs_f64());
    }
    let mut command = vec![
        softroce::THIS_PROGRAM.to_owned(),
        inside::ARGUMENT.to_owned(),
        serde_json::to_string(&(args.server, args.client))?,
    ];
    command.extend(args.options.iter().cloned());
    let ending = softroce::run(&command, &args.softroce, &mut Show { since: Instant::now() })?;
    println!("{} after {:.1} s", verdict(ending.status()), started.elapsed().as_secs_f64());
    Ok(ending.status())
}

fn verdict(status: i32) -> &'static str {
    if status == 0 { "both succeeded" } else { "failed" }
}

/// Passes output through, and reports when the device is ready.
struct Show {
    since: Instant,
}

impl Sink for Show {
    fn started(&mut self, _: usize) {
        println!("the RDMA device is ready after {:.1} s", self.since.elapsed().as_secs_f64());
    }
}

/// The part that runs on the host or guest with the device.
pub(crate) mod inside {
    use super::{End, Program, Result, bail, pingpong};

    /// First argument of this program that selects this part.
    pub(crate) const ARGUMENT: &str = "run-demo";

    pub(crate) fn main(words: &[String]) -> Result<i32> {
        let Some((programs, options)) = words.split_first() else { bail!("no programs") };
        let (server, client): (Program, Program) = serde_json::from_str(programs)?;
        let statuses = pingpong::run(server, client, options, |end, line| match end {
            End::Server => println!("[server] {line}"),
            End::Client => println!("[client] {line}"),
        })?;
        let [server, client] = statuses;
        println!("exit status: server {server}, client {client}");
        Ok(if server == 0 { client } else { server })
    }
}
