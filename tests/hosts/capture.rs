//! What goes over the wire, as tshark(1) reads it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::network::{Host, run};
use crate::program::{PATIENCE, Program, Running};

/// Packets that are being recorded.
pub(crate) struct Capture {
    tshark: Running,
    file: PathBuf,
}

/// Who has sent a packet, and its opcode.
pub(crate) type Kind = (String, u8);

impl Capture {
    /// Records all packets of RoCEv2 from now on; `None` after having said that there is no tshark.
    pub(crate) fn start(host: &Host, name: &str) -> Option<Capture> {
        let Some(program) = tshark() else {
            println!("skipped: packets are not looked at, as there is no tshark in PATH");
            return None;
        };
        let file = std::env::temp_dir().join(format!("hosts-{name}.pcap"));
        let path = file.to_str().expect("text");
        let arguments = ["-q", "-i", &host.interface, "-f", "udp port 4791", "-w", path];
        let tshark = Program::C { file: program, preload: None }.start_with(&arguments);
        tshark.wait_for("Capturing on");
        // It has begun when the file does.
        let begun = Instant::now();
        while !std::fs::metadata(&file).is_ok_and(|file| file.len() > 0) {
            assert!(begun.elapsed() < PATIENCE, "tshark does not begin");
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(Capture { tshark, file })
    }

    /// Which kinds of packets there were. Each has to be one of RoCEv2, of which nothing is wrong.
    pub(crate) fn finish(mut self) -> BTreeSet<Kind> {
        run("kill", &["-INT", &self.tshark.id().to_string()]);
        let (status, said) = self.tshark.finish();
        assert!(status.success(), "{said}");
        let kinds = kinds(&self.file);
        let _ = std::fs::remove_file(&self.file);
        kinds
    }
}

fn tshark() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join("tshark")).find(|file| file.is_file())
}

fn kinds(file: &Path) -> BTreeSet<Kind> {
    // rxe leaves out the checksum of UDP. What programs send may look like another protocol, which is no fault of the packet.
    let options = ["-o", "udp.ignore_ipv6_zero_checksum:TRUE", "--disable-protocol", "rpcordma"];
    let fields = ["frame.number", "ip.src", "ipv6.src", "infiniband.bth.opcode", "infiniband.invariant.crc"];
    let faults = ["_ws.malformed", "_ws.expert.message"];
    let mut command = Command::new("tshark");
    command.arg("-n").arg("-r").arg(file).args(options).args(["-T", "fields"]);
    command.args(fields.iter().chain(&faults).flat_map(|field| ["-e", field]));
    let output = command.output().expect("tshark starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("text");
    println!("{} packets", text.lines().count());
    text.lines().map(kind).collect()
}

fn kind(line: &str) -> Kind {
    let fields: Vec<&str> = line.split('\t').collect();
    let [_, four, six, opcode, crc, malformed, expert] = fields[..] else { panic!("{line:?}") };
    assert!(!crc.is_empty() && malformed.is_empty() && expert.is_empty(), "{line:?}");
    let opcode = opcode.strip_prefix("0x").map_or_else(|| opcode.parse(), |hex| u8::from_str_radix(hex, 16));
    (format!("{four}{six}"), opcode.unwrap_or_else(|_| panic!("no RoCEv2: {line:?}")))
}
