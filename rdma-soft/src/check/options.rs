//! Options of the checker.

use std::path::PathBuf;
use std::str::FromStr;

use super::Kind;

/// Options of the checker.
///
/// The text form, which the environment variable `RDMA_SOFT_CHECK` uses, is a list such as
/// `backtrace,suppress=overlap,leaked,json=/tmp/reports,exit=0`. Kinds to suppress follow `suppress=`. `1` stands for the defaults,
/// and an empty text or `0` switches the checker off.
///
/// ```
/// use rdma_soft::check::{Kind, Options};
///
/// let options: Options = "backtrace,suppress=overlap,leaked".parse()?;
/// assert_eq!(options.suppressed, [Kind::Overlap, Kind::Leaked]);
/// # Ok::<(), rdma_soft::check::OptionsError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Whether to record a backtrace of each post, and of the creation of each object. That makes both much slower.
    pub backtrace: bool,
    /// Kinds that are not reported.
    pub suppressed: Vec<Kind>,
    /// File to which the text of each report is appended. Standard error without it.
    pub text: Option<PathBuf>,
    /// File to which each report is appended as a line of JSON.
    pub json: Option<PathBuf>,
    /// Exit status of the process if there are reports. 0 leaves the status of the program.
    pub exit: u8,
    /// Bytes of each scatter/gather element that are compared.
    pub bytes: usize,
    /// Limit of registered memory in bytes. Without it, `ulimit -l` applies unless the process has `CAP_IPC_LOCK`.
    pub memlock: Option<u64>,
    /// Reports of each kind that are written, and leaked objects of a report. Further ones are only counted.
    pub limit: usize,
}

/// Exit status of a process with reports.
const EXIT: u8 = 66;

impl Default for Options {
    fn default() -> Self {
        Options {
            backtrace: false,
            suppressed: Vec::new(),
            text: None,
            json: None,
            exit: EXIT,
            bytes: 1 << 20,
            memlock: None,
            limit: 20,
        }
    }
}

/// Why a text is not valid for [`Options`].
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// The text names an unknown option.
    #[error(
        "unknown option {0:?}: use backtrace, suppress=KIND,KIND, text=FILE, json=FILE, exit=N, bytes=N, memlock=N, limit=N, or 1"
    )]
    Name(String),
    /// `suppress=` names an unknown kind.
    #[error("suppress={0}: unknown kind, use {kinds}", kinds = kinds())]
    Kind(String),
    /// A value is no number, or too large.
    #[error("{name}={value:?}: a whole number is expected, and for exit one below 256")]
    Value {
        /// Name of the option.
        name: &'static str,
        /// Value as given.
        value: String,
    },
}

/// The names of all kinds.
fn kinds() -> String {
    Kind::ALL.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ")
}

impl FromStr for Options {
    type Err = OptionsError;

    fn from_str(text: &str) -> Result<Self, OptionsError> {
        fn number<N: FromStr>(name: &'static str, value: &str) -> Result<N, OptionsError> {
            value.parse().map_err(|_| OptionsError::Value { name, value: value.to_owned() })
        }
        let mut options = Options::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let unknown = || OptionsError::Name(part.to_owned());
            let kind = |name: &str| name.parse().map_err(|()| OptionsError::Kind(name.to_owned()));
            match part.split_once('=') {
                Some(("suppress", name)) => options.suppressed.push(kind(name)?),
                Some(("text", file)) => options.text = Some(file.into()),
                Some(("json", file)) => options.json = Some(file.into()),
                Some(("exit", value)) => options.exit = number("exit", value)?,
                Some(("bytes", value)) => options.bytes = number("bytes", value)?,
                Some(("memlock", value)) => options.memlock = Some(number("memlock", value)?),
                Some(("limit", value)) => options.limit = number("limit", value)?,
                Some(_) => return Err(unknown()),
                None if part == "1" => {}
                None if part == "backtrace" => options.backtrace = true,
                // The second and further kinds of a list.
                None if !options.suppressed.is_empty() => options.suppressed.push(kind(part)?),
                None => return Err(unknown()),
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_parse() {
        let options: Options =
            "backtrace,json=/r,suppress=overlap,key-range,exit=9,bytes=16,memlock=7".parse().unwrap();
        assert!(options.backtrace);
        assert_eq!(options.suppressed, [Kind::Overlap, Kind::KeyRange]);
        assert_eq!((options.exit, options.bytes, options.memlock, options.json), (9, 16, Some(7), Some("/r".into())));
        assert_eq!("1".parse(), Ok(Options::default()));
    }

    #[test]
    fn unknown_options_and_kinds_are_errors() {
        for text in ["overlap", "suppress=all", "suppress=overlap,all", "exit=256", "bytes=", "colour=red", "2"] {
            assert!(text.parse::<Options>().is_err(), "{text}");
        }
        let text = |options: &str| options.parse::<Options>().unwrap_err().to_string();
        assert!(text("1,colour=red").starts_with("unknown option \"colour=red\": use backtrace, suppress="));
        assert!(text("suppress=overlap,all").starts_with("suppress=all: unknown kind, use send-changed, "));
        assert_eq!(text("exit=256"), "exit=\"256\": a whole number is expected, and for exit one below 256");
    }
}
