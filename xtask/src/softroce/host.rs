//! Runs the command on this machine, on an existing rxe device or on a new one.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, kill_process_group, setrlimit, waitid};

use super::config::{ADDRESSES, DEVICE};
use super::frame::Frame;
use super::rxe;
use super::supervise::{Event, Runner};
use crate::process;

/// Time limit for a new device to become active.
const DEVICE_LIMIT: Duration = Duration::from_secs(10);

/// An rxe device of this machine.
#[derive(Debug)]
pub(crate) struct HostDevice {
    name: String,
    /// Whether this value has created the device, and deletes it on drop.
    created: bool,
}

impl HostDevice {
    /// Finds an rxe device, or creates one if this process is root and the kernel has rdma_rxe.
    pub(crate) fn find_or_create() -> Result<Option<Self>> {
        let devices = rxe::devices();
        let preferred = devices.iter().find(|name| *name == DEVICE).or(devices.first());
        if let Some(name) = preferred {
            return Ok(Some(Self { name: name.clone(), created: false }));
        }
        let tools = ["ip", "rdma", "modprobe"].iter().all(|tool| process::find(tool).is_some());
        if !process::is_root() || !tools || !has_module("rdma_rxe") {
            return Ok(None);
        }
        Self::create().map(Some)
    }

    fn create() -> Result<Self> {
        process::output(Command::new("modprobe").args(["--all", "ib_uverbs", "rdma_ucm", "rdma_rxe"]))?;
        process::output(Command::new("ip").args(["link", "add", rxe::INTERFACE, "type", "dummy"]))?;
        // From here on, dropping `device` undoes these steps.
        let device = Self { name: DEVICE.to_owned(), created: true };
        rxe::configure(rxe::INTERFACE, ADDRESSES[0])?;
        rxe::wait_until_ready(ADDRESSES[0], DEVICE_LIMIT)?;
        Ok(device)
    }

    /// Name of the device.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Makes `command` use this device, and lifts the memlock limit if this process may.
    pub(crate) fn prepare(&self, command: &mut Command) {
        if self.name != DEVICE {
            command.env("RDMA_DEVICE", &self.name);
        }
        if process::is_root() {
            // In a container this may fail, and the limit then stays unchanged.
            let _ = setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None });
        }
    }
}

impl Drop for HostDevice {
    fn drop(&mut self) {
        if self.created {
            for command in [
                Command::new("rdma").args(["link", "delete", &self.name]),
                Command::new("ip").args(["link", "delete", rxe::INTERFACE]),
            ] {
                // The creation may have failed half-way, so there may be nothing to delete.
                let _ = process::output(command);
            }
        }
    }
}

/// Whether `module` is loaded, built in, or found by modprobe.
fn has_module(module: &str) -> bool {
    Path::new("/sys/module").join(module).exists()
        || process::output(Command::new("modprobe").args(["--dry-run", "--quiet", module])).is_ok()
}

/// A running command.
#[derive(Debug)]
pub(crate) struct LocalCommand {
    group: Pid,
    /// Set before the kernel may reuse the number of the process group.
    ended: Arc<AtomicBool>,
}

impl LocalCommand {
    /// Starts `command` without standard input, and reports to `events` as runner `number`.
    pub(crate) fn start(mut command: Command, number: usize, events: &SyncSender<Event>) -> Result<Self> {
        let child = command
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run {}", process::display(&command)))?;
        events.send(Event::Frame(number, Frame::Started)).context("the event queue is closed")?;
        let group = Pid::from_raw(i32::try_from(child.id())?).context("no process")?;
        let ended = Arc::new(AtomicBool::new(false));
        let (flag, events) = (Arc::clone(&ended), events.clone());
        std::thread::spawn(move || follow(child, number, group, &flag, &events));
        Ok(Self { group, ended })
    }
}

impl Runner for LocalCommand {
    fn kill(&mut self) {
        if !self.ended.load(Ordering::Acquire) {
            let _ = kill_process_group(self.group, Signal::KILL);
        }
    }

    fn post_mortem(&mut self) -> String {
        self.kill();
        String::new()
    }
}

fn follow(mut child: Child, number: usize, group: Pid, ended: &AtomicBool, events: &SyncSender<Event>) {
    let relays = [
        child.stdout.take().map(|pipe| relay(pipe, number, events.clone(), Frame::Stdout)),
        child.stderr.take().map(|pipe| relay(pipe, number, events.clone(), Frame::Stderr)),
    ];
    // Do not reap the child yet: until then, the number of the process group is not reused.
    let _ = waitid(WaitId::Pid(group), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
    // Processes that the command left running would keep the pipes open.
    let _ = kill_process_group(group, Signal::KILL);
    ended.store(true, Ordering::Release);
    let status = child.wait().map_or(1, process::shell_status);
    for relay in relays.into_iter().flatten() {
        let _ = relay.join();
    }
    let _ = events.send(Event::Frame(number, Frame::Exit(status)));
}

fn relay(
    mut pipe: impl Read + Send + 'static,
    number: usize,
    events: SyncSender<Event>,
    frame: fn(Vec<u8>) -> Frame,
) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(length @ 1..) = pipe.read(&mut buffer) {
            if events.send(Event::Frame(number, frame(buffer[..length].to_vec()))).is_err() {
                return;
            }
        }
    })
}
