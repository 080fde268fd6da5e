//! Whether guests may use KVM. `/dev/kvm` can be there and a guest on it hang in its firmware, so this boots one.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::config::{Config, Network};
use super::frame::Frame;
use super::layers::Layers;
use super::qemu::Accelerator;
use super::supervise::{Event, Events};
use super::vm::{Guest, Hardware};

/// A guest with KVM says hello within two seconds.
const LIMIT: Duration = Duration::from_secs(20);

/// Whether a guest really boots with KVM. Found out once for each pair of kernels and remembered in `directory`.
///
/// # Errors
/// When a signal asks this program to end meanwhile.
pub(crate) fn usable(directory: &Path, layers: &Layers) -> Result<bool> {
    let access = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
    if access.is_err() {
        return Ok(false);
    }
    let host = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let remembered = directory.join("kvm");
    let key = format!("guest {}, host {}", layers.version, host.trim());
    if let Some(answer) = fs::read_to_string(&remembered).ok().and_then(|text| recall(&text, &key)) {
        return Ok(answer);
    }
    eprintln!("softroce: finding out whether a guest boots with KVM (once, {} s at most)", LIMIT.as_secs());
    let works = boots(layers)?;
    eprintln!("softroce: {}", if works { "it does" } else { "it does not: emulating" });
    // Without the file the next run asks again.
    let _ = fs::write(remembered, format!("{key}: {}\n", if works { "works" } else { "fails" }));
    Ok(works)
}

fn recall(text: &str, key: &str) -> Option<bool> {
    match text.trim_end().strip_prefix(key)?.strip_prefix(": ")? {
        "works" => Some(true),
        "fails" => Some(false),
        _ => None,
    }
}

fn boots(layers: &Layers) -> Result<bool> {
    let events = Events::new()?;
    let config = Config {
        probe: true,
        overlays: Vec::new(),
        writable: layers.overlays.clone(),
        network: Network::Alone,
        command: Vec::new(),
        directory: "/".into(),
        environment: Vec::new(),
    };
    let hardware = Hardware { accelerator: Accelerator::Kvm, cpus: 1, memory: 256 };
    let deadline = Instant::now() + LIMIT;
    let _guest = Guest::boot(0, layers, &hardware, None, &config, events.sender(), false)?;
    match events.next(deadline) {
        Some(Event::Frame(0, Frame::Hello)) => Ok(true),
        Some(Event::Signal(signal)) => bail!("ended by signal {signal}"),
        _ => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_for_another_kernel_is_not_remembered() {
        let text = "guest 6.1, host 6.8: works\n";
        assert_eq!(recall(text, "guest 6.1, host 6.8"), Some(true));
        assert_eq!(recall(text, "guest 6.12, host 6.8"), None);
        assert_eq!(recall("", "guest 6.1, host 6.8"), None);
    }
}
