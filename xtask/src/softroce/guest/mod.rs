//! The part that runs in a guest: this program as init, which sets up the guest and runs the command.
//!
//! If init fails before it can report the error, it exits. The kernel then panics, which ends QEMU.

mod command;
mod device;
mod kernel_log;
mod port;
mod root;

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use self::port::Port;
use super::config::Config;
use super::frame::Frame;
use super::initramfs;

/// First argument of this program that makes it the init of a guest.
pub(crate) const ARGUMENT: &str = "softroce-init";

/// Time limit for each step that takes milliseconds on an idle machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// Runs the guest. The host kills it after [`Frame::Exit`] or [`Frame::Failed`].
pub(crate) fn init() -> Result<()> {
    root::mount_kernel_file_systems(Path::new("/"))?;
    root::load_modules(Path::new(initramfs::MODULES))?;
    let port = Port::open()?;
    port.send(&Frame::Hello)?;
    let message = match run(&port) {
        Ok(()) => Ok(()),
        Err(error) => port.send(&Frame::Failed(format!("{error:#}"))),
    };
    message?;
    loop {
        std::thread::park();
    }
}

fn run(port: &Port) -> Result<()> {
    let config = fs::read(initramfs::CONFIG).context("no configuration")?;
    let config: Config = serde_json::from_slice(&config).context("unreadable configuration")?;
    if config.probe {
        return Ok(());
    }
    root::enter(&config)?;
    device::create(&config.network)?;
    let status = command::run(&config, port)?;
    rustix::fs::sync();
    port.send(&Frame::Exit(status))?;
    Ok(())
}
