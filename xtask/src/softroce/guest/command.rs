//! Runs the command in the guest, relays its output, and kills the processes that it leaves behind.

use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::process::{Pid, Resource, Rlimit, Signal, WaitOptions, kill_process, setrlimit, wait};

use super::kernel_log::KernelLog;
use super::port::Port;
use crate::process;
use crate::softroce::config::Config;
use crate::softroce::frame::Frame;

/// Runs the command of `config` and returns the status that a shell would report.
pub(super) fn run(config: &Config, port: &Port) -> Result<i32> {
    // Registered memory counts as locked memory. A test that needs a lower limit sets it.
    setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None })?;
    let (program, args) = config.command.split_first().context("no command")?;
    std::env::set_current_dir(&config.directory)
        .with_context(|| format!("cannot enter {}", config.directory.display()))?;
    let kernel_log = KernelLog::relay(port)?;
    port.send(&Frame::Started)?;
    let spawned = Command::new(program)
        .args(args)
        .env_clear()
        .envs(config.environment.iter().map(|(name, value)| (name, value)))
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = match spawned {
        Ok(child) => child,
        Err(error) => {
            let message = format!("softroce: cannot run {program}: {error}\n");
            port.send(&Frame::Stderr(message.into_bytes()))?;
            return Ok(process::spawn_error_status(&error));
        }
    };
    let stdout = child.stdout.take().map(|pipe| relay(pipe, port.clone(), Frame::Stdout));
    let stderr = child.stderr.take().map(|pipe| relay(pipe, port.clone(), Frame::Stderr));

    let status = reap(i32::try_from(child.id())?)?;
    // Processes that the command left running would keep the pipes open.
    kill_all()?;
    for relay in [stdout, stderr].into_iter().flatten() {
        let _ = relay.join();
    }
    kernel_log.drain();
    Ok(status)
}

/// Waits for the process `command`, and reaps orphans, which process 1 inherits.
fn reap(command: i32) -> Result<i32> {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid.as_raw_nonzero().get() == command => {
                let signal = status.terminating_signal().map(|signal| 128 + signal);
                return Ok(status.exit_status().or(signal).unwrap_or(1));
            }
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot wait for the command"),
        }
    }
}

/// Kills all other processes. Kernel threads ignore the signal.
fn kill_all() -> Result<()> {
    for entry in fs::read_dir("/proc")?.flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some(pid) = pid.filter(|pid| *pid != 1).and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
    Ok(())
}

fn relay(mut pipe: impl Read + Send + 'static, port: Port, frame: fn(Vec<u8>) -> Frame) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(length) = pipe.read(&mut buffer) {
            if length == 0 || port.send(&frame(buffer[..length].to_vec())).is_err() {
                return;
            }
        }
    })
}
