//! Captures the packets on the wire with tshark(1).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::network::{Host, run};
use crate::program::{Program, Running, TIME_LIMIT};

/// A running capture.
pub(crate) struct Capture {
    tshark: Running,
    file: PathBuf,
}

/// Sender address and opcode of a packet.
pub(crate) type Kind = (String, u8);

impl Capture {
    /// Starts to capture RoCEv2 packets. Prints the reason and returns `None` if there is no tshark.
    pub(crate) fn start(host: &Host, name: &str) -> Option<Capture> {
        let Some(program) = tshark() else {
            println!("skipped: no check of packets, because there is no tshark in PATH");
            return None;
        };
        let file = std::env::temp_dir().join(format!("hosts-{name}.pcap"));
        let path = file.to_str().expect("the path is UTF-8");
        let arguments = ["-q", "-i", &host.interface, "-f", "udp port 4791", "-w", path];
        let tshark = Program::C { file: program, preload: None }.start_with(&arguments);
        tshark.wait_for("Capturing on");
        // The capture has started once the file has contents.
        let start = Instant::now();
        while !std::fs::metadata(&file).is_ok_and(|file| file.len() > 0) {
            assert!(start.elapsed() < TIME_LIMIT, "tshark does not start to capture");
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(Capture { tshark, file })
    }

    /// Stops the capture and returns the kinds of packets. Fails if a packet is not valid RoCEv2.
    pub(crate) fn finish(self) -> BTreeSet<Kind> {
        let fields = ["ip.src", "ipv6.src", "infiniband.bth.opcode"];
        self.finish_with(&fields).iter().map(|packet| kind(packet)).collect()
    }

    /// Stops the capture and returns these fields of each packet. Fails if a packet is not valid RoCEv2.
    pub(crate) fn finish_with(mut self, fields: &[&str]) -> Vec<Vec<String>> {
        run("kill", &["-INT", &self.tshark.id().to_string()]);
        let (status, output) = self.tshark.finish();
        assert!(status.success(), "{output}");
        let packets = packets(&self.file, fields);
        let _ = std::fs::remove_file(&self.file);
        packets
    }
}

fn tshark() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join("tshark")).find(|file| file.is_file())
}

fn packets(file: &Path, fields: &[&str]) -> Vec<Vec<String>> {
    // rxe sends no UDP checksum. tshark may take payloads for RPC over RDMA, so that dissector is disabled.
    let options = ["-o", "udp.ignore_ipv6_zero_checksum:TRUE", "--disable-protocol", "rpcordma"];
    let checks = ["frame.number", "infiniband.invariant.crc", "_ws.malformed", "_ws.expert.message"];
    let mut command = Command::new("tshark");
    command.arg("-n").arg("-r").arg(file).args(options).args(["-T", "fields"]);
    command.args(checks.iter().chain(fields).flat_map(|field| ["-e", field]));
    let output = command.output().expect("tshark starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("the output is UTF-8");
    println!("{} packets", text.lines().count());
    let packet = |line: &str| {
        let values: Vec<&str> = line.split('\t').collect();
        let [_, crc, malformed, expert, ref fields @ ..] = values[..] else { panic!("{line:?}") };
        assert!(!crc.is_empty() && malformed.is_empty() && expert.is_empty(), "{line:?}");
        fields.iter().map(|value| (*value).to_owned()).collect()
    };
    text.lines().map(packet).collect()
}

fn kind(packet: &[String]) -> Kind {
    let [four, six, opcode] = packet else { panic!("{packet:?}") };
    let opcode = opcode.strip_prefix("0x").map_or_else(|| opcode.parse(), |hex| u8::from_str_radix(hex, 16));
    (format!("{four}{six}"), opcode.unwrap_or_else(|_| panic!("not RoCEv2: {packet:?}")))
}
