//! `cargo xtask softroce`: a command where the RDMA device rxe0 is.
//!
//! rxe is the kernel's RDMA over Ethernet in software. Where this machine has it, or may load it, the command simply
//! runs. Elsewhere QEMU boots a distribution's kernel over this machine's own file system ([`layers`]) with this very
//! program as init ([`guest`]), which makes the device, runs the command and relays what it writes ([`frame`]).

mod config;
mod cpio;
mod frame;
pub(crate) mod guest;
mod host;
mod initramfs;
mod kvm;
mod layers;
mod modules;
mod output;
mod qemu;
mod release;
mod rxe;
mod supervise;
mod vm;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use self::config::{ADDRESSES, Config, Network};
use self::host::{HostDevice, LocalCommand};
use self::layers::Layers;
use self::output::Prefixed;
pub(crate) use self::output::{Passthrough, to_stderr, to_stdout};
use self::qemu::Accelerator;
pub(crate) use self::release::Release;
pub(crate) use self::supervise::{Ending, Sink};
use self::supervise::{Events, NotBooted, Runner, supervise};
use self::vm::{Guest, Hardware};
use crate::{apt, process, workspace};

/// A name for this program that holds on the host, in the guest, and when cargo has replaced the file meanwhile: at
/// `exec`, a new process is still the one that it was forked from.
pub(crate) const THIS_PROGRAM: &str = "/proc/self/exe";

/// Set for a command whose clock counts instructions. While all processes there wait for something outside of the guest, such as
/// a page of a program, that clock jumps from one timer to the next: it is no measure of how long they wait.
pub(crate) const COUNTS_INSTRUCTIONS: &str = "RDMA_COUNTS_INSTRUCTIONS";

/// The exit status when the command could not be run at all.
pub(crate) const UNAVAILABLE: i32 = 125;

/// Runs a command where the RDMA device rxe0 is: on this machine if its kernel has rdma_rxe, else in a QEMU guest
///
/// The device has the IPv4 GID 10.9.9.1 at index 1 and an active MTU of 4096. A guest sees this machine's files,
/// but what it changes is thrown away, except in the target directory. The command has no standard input; its output
/// and exit status come through (128 and the signal if one ended it, 124 at the time limit, 125 if it could not be run).
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    options: Options,
    /// Boot this many guests joined by a wire and run the command in each, with RDMA_HOST (0 or 1), RDMA_SELF (its
    /// address) and RDMA_PEER (the other's) set; lines are prefixed with the host's number
    #[arg(long, default_value_t = 1, conflicts_with = "count_instructions", value_parser = clap::value_parser!(u8).range(1..=2))]
    hosts: u8,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    command: Vec<String>,
}

/// Where and how a command runs.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// End the command after this many seconds
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    pub(crate) timeout: u64,
    /// Processors of a guest [default: 2, or 1 each for two guests]
    #[arg(long, value_name = "N")]
    pub(crate) cpus: Option<u32>,
    /// Memory of a guest in MiB [default: 2048, or 1024 each for two guests]
    #[arg(long, value_name = "MIB")]
    pub(crate) memory: Option<u32>,
    /// Set an environment variable for the command, in addition to RDMA_*, RUST*, CARGO_*, PATH, HOME and the like
    #[arg(long = "env", value_name = "NAME=VALUE", value_parser = environment_variable)]
    pub(crate) environment: Vec<(String, String)>,
    /// Where to run: `host`, `guest`, or `auto` for the host if it has or may have a device
    #[arg(long, default_value = "auto", value_name = "PLACE")]
    pub(crate) place: Place,
    /// Boot a guest with the kernel and the RDMA userland of this release, whatever this machine runs and has
    #[arg(long, value_name = "RELEASE")]
    pub(crate) release: Option<Release>,
    /// Emulate, even if KVM works
    #[arg(long)]
    pub(crate) no_kvm: bool,
    /// Emulate one processor whose clock advances by one nanosecond an instruction: the command then sees times that
    /// are counts and repeat. A program that polls takes its whole slice from the one it waits for
    #[arg(long, conflicts_with = "cpus")]
    pub(crate) count_instructions: bool,
    /// Download the guest's kernel and RDMA userland again
    #[arg(long)]
    pub(crate) refresh: bool,
    /// Show the console of the guest
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// Do not say what is being done
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: 600,
            cpus: None,
            memory: None,
            environment: Vec::new(),
            place: Place::Auto,
            release: None,
            no_kvm: false,
            count_instructions: false,
            refresh: false,
            verbose: false,
            quiet: false,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Place {
    Auto,
    Host,
    Guest,
}

/// Runs the command of `args` with its output passed through; its status.
pub(crate) fn main(args: &Args) -> Result<i32> {
    let ending = if args.hosts == 1 {
        run(&args.command, &args.options, &mut Passthrough)
    } else {
        run_pair(&args.command, &args.options, &mut Prefixed::default())
    };
    ending.map(Ending::status)
}

/// Runs `command` where rxe0 is, in the current directory, and sends its output to `sink`; its status.
pub(crate) fn run(command: &[String], options: &Options, sink: &mut dyn Sink) -> Result<Ending> {
    if options.count_instructions && options.place == Place::Host {
        bail!("only the processor of a guest can be made to count its instructions; leave out --place host");
    }
    if options.release.is_some() && options.place == Place::Host {
        bail!("only a guest can be of a release of its own; leave out --place host");
    }
    if options.place != Place::Guest && !options.count_instructions && options.release.is_none() {
        match HostDevice::find_or_create() {
            Ok(Some(device)) => return run_on_host(&device, command, options, sink),
            Ok(None) => {}
            Err(error) if options.place == Place::Host => return Err(error),
            Err(error) => {
                say(options, &format!("no device on this machine, taking a guest: {error:#}"));
            }
        }
        if options.place == Place::Host {
            bail!(
                "this machine has no rxe device, and this process may not create one (that takes \
                 root, the kernel module rdma_rxe, iproute2 and kmod)"
            );
        }
    }
    let prepared = Prepared::new(options, 2, 2048)?;
    prepared.announce(options, "a guest");
    let config = prepared.config(command, options, Network::Alone, &[])?;
    let mut run = || {
        let events = Events::new()?;
        let mut guest = prepared.boot(0, &config, None, &events, options)?;
        supervise(&mut [&mut guest], &events, Duration::from_secs(options.timeout), sink)
    };
    match run() {
        // An emulated processor of QEMU 7.2 rarely fails on code that the kernel patches while it boots: an oops in
        // `sched_clock_cpu`. Nothing of the command has run by then.
        Err(error) if error.is::<NotBooted>() => {
            eprintln!("softroce: {error:#}\nsoftroce: booting it once more");
            run()
        }
        outcome => outcome,
    }
}

/// The status of a shell for a command that cannot be started, or `error` if it is another.
fn not_started(program: &str, error: anyhow::Error) -> Result<Ending> {
    let Some(io) = error.downcast_ref::<std::io::Error>() else { return Err(error) };
    eprintln!("softroce: cannot run {program}: {io}");
    Ok(Ending::Status(process::status_of_unstarted(io)))
}

fn run_on_host(device: &HostDevice, command: &[String], options: &Options, sink: &mut dyn Sink) -> Result<Ending> {
    say(options, &format!("device {} of this machine", device.name()));
    let (program, args) = command.split_first().context("no command")?;
    let mut local = Command::new(program);
    local.args(args).envs(options.environment.iter().map(|(name, value)| (name, value)));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_about_xtask)) {
        local.env_remove(name);
    }
    device.prepare(&mut local);
    run_local(local, Duration::from_secs(options.timeout), sink).or_else(|error| not_started(program, error))
}

/// Runs `command` on this machine, device or not, with its output to `sink`, a limit, and signals that reach it.
pub(crate) fn run_local(command: Command, limit: Duration, sink: &mut dyn Sink) -> Result<Ending> {
    run_all_local(vec![command], limit, sink)
}

/// As [`run_local`], of several at once, each a runner of the sink. The first that fails decides, and all are waited for.
pub(crate) fn run_all_local(commands: Vec<Command>, limit: Duration, sink: &mut dyn Sink) -> Result<Ending> {
    let events = Events::new()?;
    let mut running = Vec::new();
    for (number, command) in commands.into_iter().enumerate() {
        running.push(LocalCommand::start(command, number, events.sender())?);
    }
    let mut runners: Vec<&mut dyn Runner> = running.iter_mut().map(|command| command as &mut dyn Runner).collect();
    supervise(&mut runners, &events, limit, sink)
}

/// Runs `command` in two guests joined by a wire, each a runner of the sink. The first that fails decides.
pub(crate) fn run_pair(command: &[String], options: &Options, sink: &mut dyn Sink) -> Result<Ending> {
    let prepared = Prepared::new(options, 1, 1024)?;
    prepared.announce(options, "two guests");
    let events = Events::new()?;
    let (first, second) = UnixStream::pair()?;
    let mut guests = Vec::new();
    for (host, end) in [first, second].into_iter().enumerate() {
        let (own, peer) = (ADDRESSES[host], ADDRESSES[1 - host]);
        let variables =
            [("RDMA_HOST", host.to_string()), ("RDMA_SELF", own.to_string()), ("RDMA_PEER", peer.to_string())];
        let config = prepared.config(command, options, Network::Wire { peer, own }, &variables)?;
        guests.push(prepared.boot(host, &config, Some(end.into()), &events, options)?);
    }
    let mut runners: Vec<&mut dyn Runner> = guests.iter_mut().map(|guest| guest as &mut dyn Runner).collect();
    supervise(&mut runners, &events, Duration::from_secs(options.timeout), sink)
}

/// Everything a guest needs, found or fetched.
struct Prepared {
    layers: Layers,
    hardware: Hardware,
}

impl Prepared {
    fn new(options: &Options, cpus: u32, memory: u32) -> Result<Self> {
        let mut directory = workspace::target_dir()?.join("softroce");
        let release = options.release.filter(|release| Release::of_this_machine() != Some(*release));
        if let Some(release) = release {
            directory.push(release.codename());
        }
        std::fs::create_dir_all(&directory)?;
        apt::install_unless(|| process::find(qemu::PROGRAM).is_some(), "qemu-system-x86")
            .with_context(|| format!("{} not found", qemu::PROGRAM))?;
        let layers = Layers::prepare(&directory, release, options.refresh)?;
        let accelerator = if options.count_instructions {
            Accelerator::Counted
        } else if !options.no_kvm && kvm::usable(&directory, &layers)? {
            Accelerator::Kvm
        } else {
            Accelerator::Emulated
        };
        let cpus = if options.count_instructions { 1 } else { options.cpus.unwrap_or(cpus) };
        let hardware = Hardware { accelerator, cpus, memory: options.memory.unwrap_or(memory) };
        Ok(Self { layers, hardware })
    }

    fn announce(&self, options: &Options, what: &str) {
        let how = match self.hardware.accelerator {
            Accelerator::Kvm => "KVM",
            Accelerator::Emulated => "emulated",
            Accelerator::Counted => "emulated, counting instructions",
        };
        say(options, &format!("booting Linux {} in {what} ({how})", self.layers.version));
    }

    fn config(
        &self,
        command: &[String],
        options: &Options,
        network: Network,
        variables: &[(&str, String)],
    ) -> Result<Config> {
        let mut environment = inherited_environment();
        let owned = |(name, value): &(&str, String)| ((*name).to_owned(), value.clone());
        environment.extend(variables.iter().map(owned));
        if options.count_instructions {
            environment.push((COUNTS_INSTRUCTIONS.to_owned(), "1".to_owned()));
        }
        environment.extend(options.environment.iter().cloned());
        Ok(Config {
            probe: false,
            overlays: Layers::OVERLAYS.map(str::to_owned).to_vec(),
            writable: workspace::target_dir()?,
            network,
            command: command.to_vec(),
            directory: std::env::current_dir().context("no working directory")?,
            environment,
        })
    }

    fn boot(
        &self,
        number: usize,
        config: &Config,
        wire: Option<OwnedFd>,
        events: &Events,
        options: &Options,
    ) -> Result<Guest> {
        Guest::boot(number, &self.layers, &self.hardware, wire, config, events.sender(), options.verbose)
    }
}

/// The variables of this process that the command in a guest gets too.
fn inherited_environment() -> Vec<(String, String)> {
    let mut variables: Vec<_> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| is_inherited(name))
        .collect();
    for (name, value) in &mut variables {
        if name == "PATH" {
            value.push_str(":/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin");
        }
    }
    variables
}

fn is_inherited(name: &str) -> bool {
    const NAMES: &[&str] = &["HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PWD", "TERM", "TZ", "USER"];
    const PREFIXES: &[&str] = &["CARGO", "IBV_", "LC_", "RDMA", "RUST"];
    let named = NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    named && !is_about_xtask(name)
}

/// Whether cargo has set the variable to tell this program about its own package.
fn is_about_xtask(name: &str) -> bool {
    ["CARGO_BIN", "CARGO_CRATE", "CARGO_MANIFEST", "CARGO_PKG", "CARGO_PRIMARY"]
        .iter()
        .any(|prefix| name.starts_with(prefix))
}

fn environment_variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("expected NAME=VALUE".to_owned()),
    }
}

fn say(options: &Options, message: &str) {
    if !options.quiet {
        eprintln!("softroce: {message}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_gets_what_configures_it_and_no_secrets() {
        for name in ["RDMA_REQUIRE_DEVICE", "RUST_LOG", "CARGO_TERM_COLOR", "PATH", "LC_ALL"] {
            assert!(is_inherited(name), "{name}");
        }
        for name in ["SSH_AUTH_SOCK", "AWS_SECRET_ACCESS_KEY", "OLDPWD", "CARGO_MANIFEST_DIR"] {
            assert!(!is_inherited(name), "{name}");
        }
    }

    #[test]
    fn a_variable_needs_a_name() {
        assert_eq!(environment_variable("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert!(environment_variable("A").is_err());
        assert!(environment_variable("=b").is_err());
    }
}
