//! fio, which writes to and reads from the memory of its server.

use std::fs;
use std::process::Command;

use anyhow::{Result, ensure};

use super::Tests;
use super::packages::Root;
use super::watch::Watch;
use crate::pair::{self, Ends, Ready};

/// Bytes of a block. Both ends have memory for one.
const BLOCK: usize = 16 << 10;
const BLOCKS: usize = 64;
/// Bytes of the files that are the memory. fio allocates more than a block.
const FILE: usize = 4 * BLOCK;

pub(super) fn run(tests: &mut Tests) {
    for verb in ["write", "read"] {
        tests.count(&format!("fio --verb={verb}"), |root| transfer(root, verb));
    }
}

/// Transfers blocks. Afterwards both ends have the same block in their memory, which is in files.
///
/// The option `--verify` of fio does not read the memory of the other end.
fn transfer(root: &Root, verb: &str) -> Result<()> {
    let (watch, port) = (Watch::new(root)?, pair::free_port()?);
    let files = [root.file("fio-server"), root.file("fio-client")];
    let content: Vec<u8> = (0..FILE as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fs::write(&files[0], &content)?;
    fs::write(&files[1], vec![0; FILE])?;
    let end = |at: usize| -> Result<Command> {
        let mut command = root.command("fio")?;
        watch.of(&mut command);
        // A job in a process ends without running the function that writes the traffic counters, so it is a thread.
        command.args(["--thread", "--name=job", "--ioengine=rdma", &format!("--port={port}")]);
        command.args([format!("--bs={BLOCK}"), format!("--size={}", BLOCK * BLOCKS)]);
        command.arg(format!("--mem=mmapshared:{}", files[at].display())).current_dir(root.file(""));
        Ok(command)
    };
    let (mut server, mut client) = (end(0)?, end(1)?);
    // The job that reads is the server of the engine.
    server.arg("--rw=read");
    client.args(["--rw=write", "--hostname=127.0.0.1", &format!("--verb={verb}")]);
    pair::output(Ready::Soft(&format!("/{port}/")), Ends::Itself, server, client)?;
    let [of_server, of_client] = [fs::read(&files[0])?, fs::read(&files[1])?];
    ensure!(of_server[..BLOCK] == of_client[..BLOCK], "the last block of client and server differs");
    ensure!((of_server[..BLOCK] == content[..BLOCK]) == (verb == "read"), "the block has not been transferred");
    watch.check("fio", 2, (BLOCK * BLOCKS) as u64)
}
