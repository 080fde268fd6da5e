//! Parsers for the values of options.

use rdma_safe::Mtu;

use crate::cpu::MAX_CPU;
use crate::plan::Connection;
use crate::report::limits::LatencyLimit;
use crate::units;

/// A list of sizes, as one value of an option.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Sizes(pub(crate) Vec<u64>);

pub(super) fn size_list(text: &str) -> Result<Sizes, String> {
    /// Largest `max_msg_sz` of any device.
    const MAX: u64 = 1 << 31;
    let sizes = units::sizes(text)?;
    match sizes.iter().find(|size| **size == 0 || **size > MAX) {
        Some(size) => Err(format!("a message is 1 byte to 2 GiB long, not {size}")),
        None => Ok(Sizes(sizes)),
    }
}

pub(super) fn inline_size(text: &str) -> Result<u32, String> {
    let size = units::size(text)?;
    u32::try_from(size).map_err(|_| format!("`{text}` is more than any device supports inline"))
}

pub(super) fn mtu(text: &str) -> Result<Mtu, String> {
    let known = [Mtu::MTU_256, Mtu::MTU_512, Mtu::MTU_1024, Mtu::MTU_2048, Mtu::MTU_4096];
    known
        .into_iter()
        .find(|mtu| mtu.bytes().is_some_and(|bytes| bytes.to_string() == text))
        .ok_or_else(|| format!("`{text}` is not 256, 512, 1024, 2048 or 4096"))
}

pub(super) fn percent(text: &str) -> Result<f64, String> {
    match text.trim().parse() {
        Ok(percent) if (0.0..=100.0).contains(&percent) => Ok(percent),
        _ => Err(format!("`{text}` is not a number from 0 to 100")),
    }
}

pub(super) fn latency_limit(text: &str) -> Result<LatencyLimit, String> {
    let (name, limit) = text.split_once('=').ok_or_else(|| format!("`{text}` is not a limit such as p99=10us"))?;
    if limit.trim().ends_with(|last: char| last.is_ascii_digit()) {
        return Err(format!("`{limit}` has no unit: ns, us, ms or s"));
    }
    let percent = match name.trim() {
        "max" => 100.0,
        name => percent(name.strip_prefix('p').unwrap_or(name))?,
    };
    Ok(LatencyLimit { percent, limit: units::duration(limit)? })
}

/// Parses 0 to 255, in decimal or hexadecimal.
pub(super) fn byte(text: &str) -> Result<u8, String> {
    let number = match text.strip_prefix("0x") {
        Some(digits) => u8::from_str_radix(digits, 16),
        None => text.parse(),
    };
    number.map_err(|_| format!("`{text}` is not a number from 0 to 255, or 0x00 to 0xff"))
}

/// Parses an ACK timeout: the exponent itself, or a time, which is rounded up to the next exponent.
pub(super) fn exponent(text: &str) -> Result<u8, String> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        let number = text.parse().ok().filter(|exponent| *exponent <= Connection::MAX_TIMEOUT);
        return number.ok_or_else(|| format!("`{text}` is not 0 to 31; a time has a unit: ns, us, ms, s"));
    }
    let time = units::duration(text)?;
    let fits = |exponent: &u8| Connection::timeout(*exponent) >= time;
    (1..=Connection::MAX_TIMEOUT).find(fits).ok_or_else(|| format!("`{text}` is more than 2.44 hours"))
}

/// Processors, in the order in which threads use them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Cpus(pub(crate) Vec<u32>);

/// Parses a list such as `2,4-7`.
pub(super) fn cpus(text: &str) -> Result<Cpus, String> {
    let wrong = || format!("`{text}` is not a list of processors such as 2,4-7");
    let number = |text: &str| text.trim().parse::<u32>().ok().filter(|cpu| *cpu <= MAX_CPU).ok_or_else(wrong);
    let mut list = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return Err(wrong());
        }
        list.extend(first..=last);
    }
    match list.iter().enumerate().find(|(at, cpu)| list[..*at].contains(cpu)) {
        Some((_, cpu)) => Err(format!("`{text}` has processor {cpu} twice")),
        None => Ok(Cpus(list)),
    }
}
