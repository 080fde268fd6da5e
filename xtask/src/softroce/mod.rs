//! `cargo xtask softroce`: runs a command with the RDMA device rxe0.
//!
//! rxe is the kernel's software implementation of RDMA over Ethernet. If this machine has an rxe device, or can create one,
//! the command runs here. Otherwise QEMU boots a distribution kernel over this machine's own file system ([`layers`]), with
//! this program as init ([`guest`]). Init creates the device, runs the command, and relays its output ([`frame`]).

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
pub(crate) use self::output::{Collected, Passthrough, to_stderr, to_stdout};
use self::qemu::Accelerator;
pub(crate) use self::release::Release;
pub(crate) use self::supervise::{Ending, Sink};
use self::supervise::{Events, NotBooted, Runner, supervise};
use self::vm::{Guest, Hardware};
use crate::{apt, process, workspace};

/// Path of this program, valid on the host and in the guest, and also after cargo has replaced the file.
///
/// In a forked child, it still refers to this program until the child calls `exec`.
pub(crate) const THIS_PROGRAM: &str = "/proc/self/exe";

/// Environment variable that is set for a command whose clock counts instructions.
///
/// While all processes wait for something outside the guest, such as a page of a program, this clock jumps from one timer
/// to the next. It does not measure how long they wait.
pub(crate) const COUNTS_INSTRUCTIONS: &str = "RDMA_COUNTS_INSTRUCTIONS";

/// Exit status if the command could not be run.
pub(crate) const UNAVAILABLE: i32 = 125;

/// Run a command with the RDMA device rxe0: on this machine if its kernel has rdma_rxe, else in a QEMU guest
///
/// The device has the IPv4 GID 10.9.9.1 at index 1 and an active MTU of 4096. A guest sees this machine's files. Its
/// changes are discarded, except in the target directory. The command has no standard input. Its output and exit status
/// are passed through. The status is 128 plus the signal if one ended the command, 124 at the time limit, and 125 if the
/// command could not be run.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    options: Options,
    /// Boot this many connected guests and run the command in each, with RDMA_HOST (0 or 1), RDMA_SELF (its address) and
    /// RDMA_PEER (the other's address) set; lines are prefixed with the host's number
    #[arg(long, default_value_t = 1, conflicts_with = "count_instructions", value_parser = clap::value_parser!(u8).range(1..=2))]
    hosts: u8,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    command: Vec<String>,
}

/// Options for running a command.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Kill the command after this many seconds
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    pub(crate) timeout: u64,
    /// Number of processors of a guest [default: 2, or 1 each for two guests]
    #[arg(long, value_name = "N")]
    pub(crate) cpus: Option<u32>,
    /// Memory of a guest in MiB [default: 2048, or 1024 each for two guests]
    #[arg(long, value_name = "MIB")]
    pub(crate) memory: Option<u32>,
    /// Set an environment variable for the command, in addition to RDMA*, RUST*, CARGO*, PATH, HOME and similar ones
    #[arg(long = "env", value_name = "NAME=VALUE", value_parser = environment_variable)]
    pub(crate) environment: Vec<(String, String)>,
    /// Where to run: `host`, `guest`, or `auto` for the host if it has a device or can create one
    #[arg(long, default_value = "auto", value_name = "PLACE")]
    pub(crate) place: Place,
    /// Boot a guest with the kernel and the RDMA userland of this release, even if this machine has a device
    #[arg(long, value_name = "RELEASE")]
    pub(crate) release: Option<Release>,
    /// Emulate, even if KVM works
    #[arg(long)]
    pub(crate) no_kvm: bool,
    /// Emulate one processor whose clock advances by one nanosecond per instruction, so that measured times are
    /// reproducible instruction counts. A program that polls delays its peer by its whole time slice
    #[arg(long, conflicts_with = "cpus")]
    pub(crate) count_instructions: bool,
    /// Download the guest's kernel and RDMA userland again
    #[arg(long)]
    pub(crate) refresh: bool,
    /// Show the guest's console
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// Print no progress messages
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

/// Runs the command with its output passed through and returns its status.
pub(crate) fn main(args: &Args) -> Result<i32> {
    let ending = if args.hosts == 1 {
        run(&args.command, &args.options, &mut Passthrough)
    } else {
        run_pair(&args.command, &args.options, &mut Prefixed::default())
    };
    ending.map(Ending::status)
}

/// Runs `command` on the host or in a guest, in the current directory, with its output to `sink`.
pub(crate) fn run(command: &[String], options: &Options, sink: &mut dyn Sink) -> Result<Ending> {
    if options.count_instructions && options.place == Place::Host {
        bail!("only a guest can count instructions; leave out --place host");
    }
    if options.release.is_some() && options.place == Place::Host {
        bail!("--release needs a guest; leave out --place host");
    }
    if options.place != Place::Guest && !options.count_instructions && options.release.is_none() {
        match HostDevice::find_or_create() {
            Ok(Some(device)) => return run_on_host(&device, command, options, sink),
            Ok(None) => {}
            Err(error) if options.place == Place::Host => return Err(error),
            Err(error) => {
                log(options, &format!("no device on this machine, using a guest: {error:#}"));
            }
        }
        if options.place == Place::Host {
            bail!(
                "this machine has no rxe device, and this process cannot create one (that needs \
                 root, the kernel module rdma_rxe, iproute2 and kmod)"
            );
        }
    }
    let prepared = Prepared::new(options, 2, 2048)?;
    prepared.announce(options, "a guest");
    let config = prepared.config(command, options, Network::Dummy, &[])?;
    let mut run = || {
        let events = Events::new()?;
        let mut guest = prepared.boot(0, &config, None, &events, options)?;
        supervise(&mut [&mut guest], &events, Duration::from_secs(options.timeout), sink)
    };
    match run() {
        // In QEMU 7.2, an emulated processor sometimes fails on code that the kernel patches during boot, with an oops in
        // `sched_clock_cpu`. The command has not started at that point, so it is safe to retry.
        Err(error) if error.is::<NotBooted>() => {
            eprintln!("softroce: {error:#}\nsoftroce: booting the guest again");
            run()
        }
        outcome => outcome,
    }
}

/// The status that a shell would report for a command that cannot be started. Passes other errors on.
fn not_started(program: &str, error: anyhow::Error) -> Result<Ending> {
    let Some(io) = error.downcast_ref::<std::io::Error>() else { return Err(error) };
    eprintln!("softroce: cannot run {program}: {io}");
    Ok(Ending::Status(process::spawn_error_status(io)))
}

fn run_on_host(device: &HostDevice, command: &[String], options: &Options, sink: &mut dyn Sink) -> Result<Ending> {
    log(options, &format!("using device {} of this machine", device.name()));
    let (program, args) = command.split_first().context("no command")?;
    let mut local = Command::new(program);
    local.args(args).envs(options.environment.iter().map(|(name, value)| (name, value)));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_set_for_xtask)) {
        local.env_remove(name);
    }
    device.prepare(&mut local);
    run_local(local, Duration::from_secs(options.timeout), sink).or_else(|error| not_started(program, error))
}

/// Runs `command` on this machine, with its output to `sink` and a time limit. Signals to this program end it.
///
/// No RDMA device is set up.
pub(crate) fn run_local(command: Command, limit: Duration, sink: &mut dyn Sink) -> Result<Ending> {
    run_all_local(vec![command], limit, sink)
}

/// [`run_local`] for several commands at once, each with its own runner number in `sink`.
///
/// Waits for all commands and returns the first failure.
pub(crate) fn run_all_local(commands: Vec<Command>, limit: Duration, sink: &mut dyn Sink) -> Result<Ending> {
    let events = Events::new()?;
    let mut running = Vec::new();
    for (number, command) in commands.into_iter().enumerate() {
        running.push(LocalCommand::start(command, number, events.sender())?);
    }
    let mut runners: Vec<&mut dyn Runner> = running.iter_mut().map(|command| command as &mut dyn Runner).collect();
    supervise(&mut runners, &events, limit, sink)
}

/// Runs `command` in two connected guests, each with its own runner number in `sink`. Returns the first failure.
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

/// Layers and hardware for booting guests.
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

    fn announce(&self, options: &Options, guests: &str) {
        let accelerator = match self.hardware.accelerator {
            Accelerator::Kvm => "KVM",
            Accelerator::Emulated => "emulated",
            Accelerator::Counted => "emulated, counting instructions",
        };
        log(options, &format!("booting Linux {} in {guests} ({accelerator})", self.layers.version));
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

/// Environment variables of this process that the command in a guest inherits.
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
    named && !is_set_for_xtask(name)
}

/// Whether cargo sets the variable to describe this program's own package.
fn is_set_for_xtask(name: &str) -> bool {
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

fn log(options: &Options, message: &str) {
    if !options.quiet {
        eprintln!("softroce: {message}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_inherits_configuration_but_no_secrets() {
        for name in ["RDMA_REQUIRE_DEVICE", "RUST_LOG", "CARGO_TERM_COLOR", "PATH", "LC_ALL"] {
            assert!(is_inherited(name), "{name}");
        }
        for name in ["SSH_AUTH_SOCK", "AWS_SECRET_ACCESS_KEY", "OLDPWD", "CARGO_MANIFEST_DIR"] {
            assert!(!is_inherited(name), "{name}");
        }
    }

    #[test]
    fn an_environment_variable_needs_a_name() {
        assert_eq!(environment_variable("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert!(environment_variable("A").is_err());
        assert!(environment_variable("=b").is_err());
    }
}
