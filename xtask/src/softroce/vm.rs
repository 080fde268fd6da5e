//! A QEMU process: starts it, reads its output, and kills it.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::io::FdFlags;
use rustix::pipe::PipeFlags;
use rustix::process::Signal;

use super::config::Config;
use super::frame::Frame;
use super::initramfs::Initramfs;
use super::layers::Layers;
use super::modules;
use super::qemu::{self, Accelerator, Machine, Wire};
use super::supervise::{Event, Runner};
use crate::wait;

/// Number of console lines to keep for error messages.
const CONSOLE_TAIL: usize = 60;

/// Hardware of a guest.
#[derive(Clone, Debug)]
pub(crate) struct Hardware {
    pub(crate) accelerator: Accelerator,
    pub(crate) cpus: u32,
    /// Memory in MiB.
    pub(crate) memory: u32,
}

/// A running guest. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Guest {
    qemu: Child,
    console: Arc<Mutex<VecDeque<String>>>,
    readers: Vec<JoinHandle<()>>,
}

impl Guest {
    /// Boots guest `number`, optionally with an end of a wire, and sends its frames to `events`.
    ///
    /// `verbose` prints its console. The kernel kills the guest when the calling thread ends.
    pub(crate) fn boot(
        number: usize,
        layers: &Layers,
        hardware: &Hardware,
        wire: Option<OwnedFd>,
        config: &Config,
        events: &SyncSender<Event>,
        verbose: bool,
    ) -> Result<Self> {
        let early = modules::early(&layers.modules())?;
        let initramfs = Initramfs::pack(&early, config)?;
        let (frames, frames_end) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let (console, console_end) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let machine = Machine {
            accelerator: hardware.accelerator,
            verbose,
            cpus: hardware.cpus,
            memory: hardware.memory,
            kernel: layers.image(),
            initramfs: initramfs.path(),
            base: layers.base.clone(),
            overlays: layers.overlays.clone(),
            writable: PathBuf::from(&config.writable),
            wire: wire.as_ref().map(|socket| Wire { end: number as u8, socket: socket.as_raw_fd() }),
            frames: frames_end.as_raw_fd(),
            console: console_end.as_raw_fd(),
        };
        let mut inherited = vec![machine.frames, machine.console, initramfs.fd()];
        inherited.extend(machine.wire.map(|wire| wire.socket));
        let mut qemu = spawn(&machine, inherited)?;
        drop((frames_end, console_end, wire));

        let tail = Arc::new(Mutex::new(VecDeque::new()));
        forward_frames(number, frames, events.clone());
        let mut readers = vec![read_console(console, &tail, verbose)];
        readers.extend(qemu.stderr.take().map(|stderr| read_console(stderr.into(), &tail, verbose)));
        Ok(Self { qemu, console: tail, readers })
    }
}

impl Runner for Guest {
    fn kill(&mut self) {
        // Fails if the process has ended already.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }

    fn post_mortem(&mut self) -> String {
        let exited = || self.qemu.try_wait().ok().flatten();
        let mut report = match wait::until(Duration::from_secs(2), exited) {
            Some(status) => format!("QEMU ended: {status}\n"),
            None => String::new(),
        };
        self.kill();
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
        let tail = self.console.lock().unwrap_or_else(PoisonError::into_inner);
        if !tail.is_empty() {
            report.push_str("last lines of the guest's console:\n");
        }
        for line in tail.iter() {
            report.push_str("  ");
            report.push_str(line);
            report.push('\n');
        }
        report
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.kill();
    }
}

fn spawn(machine: &Machine, inherited: Vec<i32>) -> Result<Child> {
    let mut command = Command::new(qemu::PROGRAM);
    command
        .args(machine.arguments())
        // Ctrl-C must reach only this program, which then ends the guest.
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let prepare = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        for &fd in &inherited {
            // SAFETY: `boot` keeps these descriptors open until `spawn` returns, and the child has copies of them.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
        }
        Ok(())
    };
    // SAFETY: `prepare` makes system calls only, and neither allocates nor locks.
    unsafe { command.pre_exec(prepare) };
    command.spawn().with_context(|| format!("cannot run {}", qemu::PROGRAM))
}

fn forward_frames(number: usize, frames: OwnedFd, events: SyncSender<Event>) {
    std::thread::spawn(move || {
        let mut frames = BufReader::with_capacity(1 << 16, File::from(frames));
        while let Ok(Some(frame)) = Frame::read_from(&mut frames) {
            if events.send(Event::Frame(number, frame)).is_err() {
                break;
            }
        }
        let _ = events.send(Event::Closed(number));
    });
}

fn read_console(stream: OwnedFd, tail: &Arc<Mutex<VecDeque<String>>>, verbose: bool) -> JoinHandle<()> {
    let tail = Arc::clone(tail);
    std::thread::spawn(move || {
        let mut stream = BufReader::new(File::from(stream));
        let mut line = Vec::new();
        // A line ends after 4 KiB even without a newline.
        while matches!((&mut stream).take(4096).read_until(b'\n', &mut line), Ok(1..)) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            line.clear();
            if text.is_empty() {
                continue;
            }
            if verbose {
                eprintln!("{text}");
            }
            let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
            if tail.len() == CONSOLE_TAIL {
                tail.pop_front();
            }
            tail.push_back(text);
        }
    })
}
