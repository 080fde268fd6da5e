//! The QEMU command line of a guest.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::config::{ETHERNET_MTU, tag};
use super::frame::PORT;
use super::initramfs::{INIT, LIBRARIES};

/// Name of the emulator.
pub(crate) const PROGRAM: &str = "qemu-system-x86_64";

/// How QEMU executes the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accelerator {
    /// On this machine's processor.
    Kvm,
    /// By translation, with a thread for each processor.
    Emulated,
    /// By translation in one thread, with a clock that advances by one nanosecond per instruction.
    Counted,
}

impl Accelerator {
    fn arguments(self) -> &'static [&'static str] {
        match self {
            Accelerator::Kvm => &["-accel", "kvm"],
            Accelerator::Emulated => &["-accel", "tcg,thread=multi"],
            // Without `sleep=off`, an idle processor waits for its next timer in real time.
            Accelerator::Counted => &["-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off"],
        }
    }
}

/// Parameters of a guest's command line.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    pub(crate) accelerator: Accelerator,
    /// Whether the kernel logs all messages to the console instead of errors only.
    pub(crate) verbose: bool,
    pub(crate) cpus: u32,
    /// Memory in MiB.
    pub(crate) memory: u32,
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: String,
    pub(crate) base: PathBuf,
    pub(crate) overlays: PathBuf,
    pub(crate) writable: PathBuf,
    pub(crate) wire: Option<Wire>,
    /// Descriptor for the frames.
    pub(crate) frames: i32,
    /// Descriptor for the console output.
    pub(crate) console: i32,
}

/// One end of an Ethernet link between two guests.
///
/// The link loses no frames: the sender blocks while the receiver does not read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wire {
    /// Number of this end, 0 or 1.
    pub(crate) end: u8,
    /// Descriptor of a stream socket that is connected to the other end.
    pub(crate) socket: i32,
}

impl Machine {
    /// Arguments for [`PROGRAM`].
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let mut args: Vec<OsString> = Vec::new();
        let mut add = |words: &[&str]| args.extend(words.iter().map(OsString::from));
        add(&["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
        add(&["-machine", "q35", "-cpu", "max"]);
        add(self.accelerator.arguments());
        add(&["-smp", &self.processors(), "-m", &format!("{}M", self.memory)]);

        // QEMU truncates files that it gets by -add-fd, which fails on a pipe. So it opens the pipe by this path.
        let console = format!("file,id=console,path=/proc/self/fd/{}", self.console);
        add(&["-chardev", &console, "-serial", "chardev:console"]);
        let frames = format!("file,id=frames,path=/proc/self/fd/{}", self.frames);
        add(&["-chardev", &frames, "-device", "virtio-serial-pci"]);
        add(&["-device", &format!("virtserialport,chardev=frames,name={PORT}")]);
        if let Some(Wire { end, socket }) = self.wire {
            add(&["-netdev", &format!("socket,id=wire,fd={socket}")]);
            let mac = format!("52:54:00:09:09:{:02x}", end + 1);
            let nic = "virtio-net-pci,netdev=wire,romfile=";
            add(&["-device", &format!("{nic},mac={mac},host_mtu={ETHERNET_MTU}")]);
        }
        // On a busy host, the guest's clocks seem to drift apart, and the kernel switches to another clock. To switch, it
        // patches its running code, which under emulation has crashed the guest (Linux 6.12: "Oops: int3"). `tsc=reliable`
        // disables the comparison of the clocks. While it boots, the kernel also checks that its timer ticks, and panics if
        // a busy host lets no tick through in time. `no_timer_check` disables this check.
        //
        // The words after `--` are the arguments of init. A word NAME=VALUE before them becomes an environment variable of
        // init.
        let verbosity = if self.verbose { "loglevel=7" } else { "quiet" };
        let kernel_line = format!(
            "console=ttyS0 {verbosity} panic=-1 mitigations=off tsc=reliable no_timer_check rdinit={INIT} \
             LD_LIBRARY_PATH={LIBRARIES} RUST_BACKTRACE=1 -- {}",
            super::guest::ARGUMENT
        );
        add(&["-initrd", &self.initramfs, "-append", &kernel_line]);

        args.extend(["-kernel".into(), self.kernel.clone().into()]);
        args.extend(virtfs(&self.base, tag::BASE, true));
        args.extend(virtfs(&self.overlays, tag::OVERLAYS, true));
        args.extend(virtfs(&self.writable, tag::WRITABLE, false));
        args
    }

    /// Number of processors, and room for a second one if QEMU emulates a single one.
    ///
    /// If a guest cannot have a second processor, QEMU translates locked instructions to plain ones, and QEMU 7.2 also leaves out
    /// memory barriers. But a thread of QEMU emulates the network card, and shares memory with the guest's processor. Linux uses
    /// a locked instruction as a barrier between them. Without it, each of the two can miss what the other one has just written.
    /// Then the card stops for ever.
    fn processors(&self) -> String {
        match (self.accelerator, self.cpus) {
            (Accelerator::Emulated, 1) => "1,maxcpus=2".to_owned(),
            (_, cpus) => cpus.to_string(),
        }
    }
}

/// Arguments that share the directory `path` with the guest.
fn virtfs(path: &Path, tag: &str, read_only: bool) -> [OsString; 2] {
    let mut value = OsString::from("local,path=");
    // A comma in a value has to be doubled.
    value.push(path.to_string_lossy().replace(',', ",,"));
    value.push(format!(",mount_tag={tag},security_model=none,multidevs=remap"));
    if read_only {
        value.push(",readonly=on");
    }
    ["-virtfs".into(), value]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        Machine {
            accelerator: Accelerator::Emulated,
            verbose: false,
            cpus: 2,
            memory: 2048,
            kernel: "/k/vmlinuz".into(),
            initramfs: "/proc/self/fd/9".into(),
            base: "/".into(),
            overlays: "/t,x/layers".into(),
            writable: "/t".into(),
            wire: None,
            frames: 7,
            console: 8,
        }
    }

    fn line(machine: &Machine) -> String {
        let args: Vec<_> = machine.arguments().iter().map(|arg| arg.to_string_lossy().into_owned()).collect();
        args.join(" ")
    }

    #[test]
    fn only_the_target_directory_is_writable() {
        let line = line(&machine());
        let shares: Vec<_> = line.split("-virtfs ").skip(1).collect();
        assert_eq!(shares.len(), 3);
        for share in shares {
            let writable = share.contains("mount_tag=writable");
            assert_eq!(share.contains("readonly=on"), !writable, "{share}");
        }
    }

    #[test]
    fn a_comma_in_a_path_is_escaped() {
        assert!(line(&machine()).contains("path=/t,,x/layers,mount_tag=overlays"));
    }

    #[test]
    fn a_single_emulated_processor_executes_memory_barriers() {
        let processors = |accelerator, cpus| Machine { accelerator, cpus, ..machine() }.processors();
        assert_eq!(processors(Accelerator::Emulated, 1), "1,maxcpus=2");
        assert_eq!(processors(Accelerator::Emulated, 2), "2");
        // This would change nothing here but the published counts: QEMU always leaves the barriers out when it counts.
        assert_eq!(processors(Accelerator::Counted, 1), "1");
    }

    #[test]
    fn the_two_ends_of_a_wire_have_different_addresses() {
        let end = |end, socket| line(&Machine { wire: Some(Wire { end, socket }), ..machine() });
        let (first, second) = (end(0, 11), end(1, 12));
        assert!(first.contains("socket,id=wire,fd=11") && second.contains("socket,id=wire,fd=12"));
        assert!(first.contains("mac=52:54:00:09:09:01") && second.contains("mac=52:54:00:09:09:02"));
    }
}
