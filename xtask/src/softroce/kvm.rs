//! Tests whether guests can use KVM.
//!
//! A guest may hang in its firmware even where `/dev/kvm` exists, so the test boots one.

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

/// Time limit for the test boot. With KVM, a guest boots within two seconds.
const LIMIT: Duration = Duration::from_secs(20);

/// Whether a guest boots with KVM. The answer for each pair of kernels is cached in `directory`.
///
/// # Errors
/// If a signal ends this program during the test.
pub(crate) fn usable(directory: &Path, layers: &Layers) -> Result<bool> {
    let access = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
    if access.is_err() {
        return Ok(false);
    }
    let host = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cache = directory.join("kvm");
    let key = format!("guest {}, host {}", layers.version, host.trim());
    if let Some(answer) = fs::read_to_string(&cache).ok().and_then(|text| cached_answer(&text, &key)) {
        return Ok(answer);
    }
    eprintln!("softroce: testing whether a guest boots with KVM (once, {} s at most)", LIMIT.as_secs());
    let works = boots(layers)?;
    eprintln!("softroce: {}", if works { "KVM works" } else { "KVM does not work; guests are emulated" });
    // If this fails, the next run tests again.
    let _ = fs::write(cache, format!("{key}: {}\n", if works { "works" } else { "fails" }));
    Ok(works)
}

fn cached_answer(text: &str, key: &str) -> Option<bool> {
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
        network: Network::Dummy,
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
    fn a_cached_answer_is_valid_for_its_kernels_only() {
        let text = "guest 6.1, host 6.8: works\n";
        assert_eq!(cached_answer(text, "guest 6.1, host 6.8"), Some(true));
        assert_eq!(cached_answer(text, "guest 6.12, host 6.8"), None);
        assert_eq!(cached_answer("", "guest 6.1, host 6.8"), None);
    }
}
