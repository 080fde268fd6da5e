//! Why the program ends early.

use std::fmt::Display;

/// Why the program ends early.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Input, output or another resource of this end has failed.
    Local(String),
    /// The connection has failed, or cannot be made.
    Connection(String),
    /// A signal has arrived, with its number.
    Interrupted(u8),
}

/// A result of this program.
pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    pub(crate) fn local(what: impl Display, error: impl Display) -> Self {
        Failure::Local(format!("{what}: {error}"))
    }

    pub(crate) fn connection(what: impl Display, error: impl Display) -> Self {
        Failure::Connection(format!("{what}: {error}"))
    }

    /// Prints the failure on standard error.
    pub(crate) fn print(&self) {
        match self {
            Failure::Local(message) | Failure::Connection(message) => eprintln!("rdma-cat: {}", one_line(message)),
            Failure::Interrupted(signal) => eprintln!("rdma-cat: interrupted by signal {signal}"),
        }
    }
}

/// Joins lines, and escapes control characters: a peer may have sent part of the text.
fn one_line(message: &str) -> String {
    let line = message.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    let shown = |letter: char| if letter.is_control() { letter.escape_default().to_string() } else { letter.into() };
    line.chars().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::one_line;

    #[test]
    fn a_message_is_one_line_without_control_characters() {
        assert_eq!(one_line("aborted:\n  \x1b]0;title\x07 grüße\r"), r"aborted: \u{1b}]0;title\u{7} grüße");
    }
}
