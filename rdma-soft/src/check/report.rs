//! Reports, as text and as JSON.

use std::fmt::{self, Write as _};

use super::Kind;

/// A registered region, as a report names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Region {
    /// Local and remote key.
    pub key: u32,
    /// First address in this process.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
    /// Whether it was deregistered.
    pub is_deregistered: bool,
}

/// An object that was never destroyed.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct LeakedObject {
    /// Type, number and size of the object, and what it is used for.
    pub description: String,
    /// Backtrace of its creation, if [`Options::backtrace`](super::Options::backtrace) is set.
    pub backtrace: Option<String>,
}

/// A misuse of the device.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Report {
    /// What it is about.
    pub kind: Kind,
    /// Number of the queue pair.
    pub qp: Option<u32>,
    /// Identifier of the work request. For work of an endpoint of rdma-safe it is `WorkId::wr_id`.
    pub wr_id: Option<u64>,
    /// First address concerned, and the number of bytes.
    pub memory: Option<(u64, u64)>,
    /// Region concerned, or the nearest one.
    pub region: Option<Region>,
    /// Objects that were left, at most [`Options::limit`](super::Options::limit).
    pub objects: Vec<LeakedObject>,
    /// Description in English.
    pub text: String,
    /// Backtrace of the post, if [`Options::backtrace`](super::Options::backtrace) is set.
    pub backtrace: Option<String>,
}

impl Report {
    pub(super) fn new(kind: Kind, text: impl Into<String>) -> Report {
        let (objects, text) = (Vec::new(), text.into());
        Report { kind, qp: None, wr_id: None, memory: None, region: None, objects, text, backtrace: None }
    }

    /// The report as an object of JSON, without a line break. Fields that do not apply are left out.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut json = format!("{{\"pid\":{},\"kind\":\"{}\"", std::process::id(), self.kind);
        // Writing to a `String` never fails.
        let mut add = |field: fmt::Arguments<'_>| _ = json.write_fmt(field);
        if let Some(qp) = self.qp {
            add(format_args!(",\"qp\":{qp}"));
        }
        if let Some(wr_id) = self.wr_id {
            add(format_args!(",\"wr_id\":{wr_id}"));
        }
        if let Some((address, len)) = self.memory {
            add(format_args!(",\"address\":{address},\"length\":{len}"));
        }
        if let Some(Region { key, address, len, is_deregistered }) = self.region {
            add(format_args!(
                ",\"region\":{{\"key\":{key},\"address\":{address},\"length\":{len},\"deregistered\":{is_deregistered}}}"
            ));
        }
        for (at, LeakedObject { description, backtrace }) in self.objects.iter().enumerate() {
            let before = if at == 0 { ",\"objects\":[" } else { "," };
            add(format_args!("{before}{{\"text\":{}", Quoted(description)));
            if let Some(backtrace) = backtrace {
                add(format_args!(",\"backtrace\":{}", Quoted(backtrace)));
            }
            let after = if at + 1 == self.objects.len() { "}]" } else { "}" };
            add(format_args!("{after}"));
        }
        add(format_args!(",\"text\":{}", Quoted(&self.text)));
        if let Some(backtrace) = &self.backtrace {
            add(format_args!(",\"backtrace\":{}", Quoted(backtrace)));
        }
        json.push('}');
        json
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rdma-soft check: {}: {}", self.kind, self.text)?;
        if let Some(qp) = self.qp {
            write!(f, "\n  queue pair {qp:#x}")?;
        }
        if let Some(wr_id) = self.wr_id {
            write!(f, "\n  wr_id {wr_id:#x}")?;
        }
        if let Some((address, len)) = self.memory {
            write!(f, "\n  memory {address:#x}, {len} bytes")?;
        }
        if let Some(Region { key, address, len, is_deregistered }) = self.region {
            let state = if is_deregistered { ", deregistered" } else { "" };
            write!(f, "\n  region {address:#x} to {:#x}, {len} bytes, key {key:#x}{state}", address + len)?;
        }
        for LeakedObject { description, backtrace } in &self.objects {
            write!(f, "\n  {description}")?;
            if let Some(backtrace) = backtrace {
                write!(f, "\n  created at\n{}", backtrace.trim_end())?;
            }
        }
        if let Some(backtrace) = &self.backtrace {
            write!(f, "\n  posted at\n{}", backtrace.trim_end())?;
        }
        Ok(())
    }
}

/// A string of JSON.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        for letter in self.0.chars() {
            match letter {
                '"' | '\\' => write!(f, "\\{letter}")?,
                '\0'..='\x1f' => write!(f, "\\u{:04x}", letter as u32)?,
                _ => f.write_char(letter)?,
            }
        }
        f.write_char('"')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_an_object_of_json() {
        let region = Region { key: 5, address: 4096, len: 64, is_deregistered: true };
        let report = Report {
            qp: Some(17),
            wr_id: Some(3),
            memory: Some((4100, 8)),
            region: Some(region),
            ..Report::new(Kind::StaleKey, "a \"key\"\n")
        };
        let expected = format!(
            "{{\"pid\":{},\"kind\":\"stale-key\",\"qp\":17,\"wr_id\":3,\"address\":4100,\"length\":8,\"region\":\
             {{\"key\":5,\"address\":4096,\"length\":64,\"deregistered\":true}},\"text\":\"a \\\"key\\\"\\u000a\"}}",
            std::process::id()
        );
        assert_eq!(report.to_json(), expected);
    }

    #[test]
    fn leaked_objects_are_a_list() {
        let object = |name: &str, backtrace: Option<&str>| LeakedObject {
            description: name.to_owned(),
            backtrace: backtrace.map(str::to_owned),
        };
        let objects = vec![object("a", Some("main\n")), object("b", None)];
        let report = Report { objects, ..Report::new(Kind::Leaked, "x") };
        let list = r#","objects":[{"text":"a","backtrace":"main\u000a"},{"text":"b"}],"text":"x"}"#;
        assert!(report.to_json().ends_with(list), "{}", report.to_json());
        assert_eq!(report.to_string(), "rdma-soft check: leaked: x\n  a\n  created at\nmain\n  b");
    }

    #[test]
    fn a_report_as_text_names_the_place() {
        let report =
            Report { qp: Some(17), wr_id: Some(3), memory: Some((4100, 8)), ..Report::new(Kind::Overlap, "x") };
        assert_eq!(
            report.to_string(),
            "rdma-soft check: overlap: x\n  queue pair 0x11\n  wr_id 0x3\n  memory 0x1004, 8 bytes"
        );
    }
}
