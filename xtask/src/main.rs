//! Commands for contributors to this workspace: `cargo xtask COMMAND`.

mod apt;
mod bench;
mod bindgen;
mod demo;
mod headers;
mod pair;
mod pingpong;
mod process;
mod soak;
mod soft;
mod softroce;
mod test;
mod wait;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Tests, a demonstration, and an RDMA device in software, for this workspace
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(demo::Args),
    Test(test::Args),
    Soft(soft::Args),
    Softroce(softroce::Args),
    Bench(bench::Args),
    Soak(soak::Args),
    Bindgen(bindgen::Args),
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    match words.get(1).map(String::as_str) {
        // Internal commands, which this program passes to itself, mostly inside a guest. They are not listed as subcommands.
        Some(softroce::guest::ARGUMENT) => return finish(softroce::guest::init().map(|()| 0)),
        Some(test::stage_run::ARGUMENT) => return finish(test::stage_run::main(&words[2..])),
        Some(test::inside::ARGUMENT) => return finish(test::inside::main(&words[2..])),
        Some(demo::inside::ARGUMENT) => return finish(demo::inside::main(&words[2..])),
        Some(bench::connections::inside::ARGUMENT) => return finish(bench::connections::inside::main(&words[2..])),
        Some(bench::messages::inside::ARGUMENT) => return finish(bench::messages::inside::main(&words[2..])),
        Some(bench::pingpong::inside::ARGUMENT) => return finish(bench::pingpong::inside::main(&words[2..])),
        Some(bench::softroce::inside::ARGUMENT) => return finish(bench::softroce::inside::main(&words[2..])),
        _ => {}
    }
    let Cli { command } = Cli::parse();
    finish(match &command {
        Command::Demo(args) => demo::main(args),
        Command::Test(args) => test::main(args, &words[2..]),
        Command::Soft(args) => soft::main(args),
        Command::Softroce(args) => Ok(softroce::main(args).unwrap_or_else(|error| {
            eprintln!("softroce: error: {error:#}");
            softroce::UNAVAILABLE
        })),
        Command::Bench(args) => bench::main(args),
        Command::Soak(args) => soak::main(args),
        Command::Bindgen(args) => bindgen::main(args),
    })
}

fn finish(status: Result<i32>) -> ExitCode {
    match status {
        Ok(status) => ExitCode::from(u8::try_from(status).unwrap_or(1)),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
