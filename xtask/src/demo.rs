//! `cargo xtask demo`: two processes exchange messages over RDMA.

use std::time::Instant;

use anyhow::{Result, bail};

use crate::pair::End;
use crate::pingpong::{self, Program};
use crate::softroce::{self, Options, Sink};

/// Builds the example rc_pingpong and runs a server and a client of it over SoftRoCE
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    softroce: Options,
    /// The program that is the server
    #[arg(long, default_value = "rust", value_name = "PROGRAM")]
    server: Program,
    /// The program that is the client
    #[arg(long, default_value = "rust", value_name = "PROGRAM")]
    client: Program,
    /// Options for both programs, such as `-e` for events or `-s 65536` for the size of a message
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

/// Passes output through, and says when it begins.
struct Show {
    since: Instant,
}

impl Sink for Show {
    fn started(&mut self, _: usize) {
        println!("the RDMA device is ready after {:.1} s", self.since.elapsed().as_secs_f64());
    }
}

/// The part that runs where the device is.
pub(crate) mod inside {
    use super::{End, Program, Result, bail, pingpong};

    /// The argument that makes this program run it.
    pub(crate) const ARGUMENT: &str = "run-demo";

    pub(crate) fn main(words: &[String]) -> Result<i32> {
        let Some((programs, options)) = words.split_first() else { bail!("no programs") };
        let (server, client): (Program, Program) = serde_json::from_str(programs)?;
        let statuses = pingpong::run(server, client, options, |end, line| match end {
            End::Server => println!("[server] {line}"),
            End::Client => println!("[client] {line}"),
        })?;
        let [server, client] = statuses;
        println!("exit status of the server {server}, of the client {client}");
        Ok(if server == 0 { client } else { server })
    }
}
