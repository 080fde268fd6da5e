//! Runs other programs, and turns their status into an error and their output into text.

use std::env;
use std::ffi::OsStr;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail};

/// Runs `command` and returns its standard output.
///
/// # Errors
/// If it fails, with its standard error.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let shown = display(command);
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run `{shown}`"))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("`{shown}` failed ({}):\n{}", output.status, stderr.trim_end());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs `command`, which inherits standard output and error.
///
/// # Errors
/// If it fails.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = display(command);
    let status = command.stdin(Stdio::null()).status().with_context(|| format!("cannot run `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` failed ({status})");
    }
    Ok(())
}

/// The status that a shell would report: the exit status, or 128 plus the signal.
pub(crate) fn shell_status(status: ExitStatus) -> i32 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128 + signal,
        (None, None) => 1,
    }
}

/// The status that a shell would report for a program that could not be started.
pub(crate) fn spawn_error_status(error: &std::io::Error) -> i32 {
    match error.kind() {
        std::io::ErrorKind::NotFound => 127,
        _ => 126,
    }
}

/// Finds the program `name` on the `PATH` or in the directories of system administration tools.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/bin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|candidate| candidate.is_file())
}

/// Whether this process runs as root.
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Formats `command` for a shell, with the program's file name in place of its path.
pub(crate) fn display(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut line = quote(program.file_name().unwrap_or(program.as_os_str()));
    for arg in command.get_args() {
        line.push(' ');
        line.push_str(&quote(arg));
    }
    line
}

/// Quotes `word` for a shell if necessary.
pub(crate) fn quote(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_words_with_special_characters_are_quoted() {
        assert_eq!(quote(OsStr::new("--lib=a/b.so")), "--lib=a/b.so");
        assert_eq!(quote(OsStr::new("two words")), "'two words'");
        assert_eq!(quote(OsStr::new("it's")), r"'it'\''s'");
        assert_eq!(quote(OsStr::new("")), "''");
    }

    #[test]
    fn a_signal_becomes_the_status_of_a_shell() {
        assert_eq!(shell_status(ExitStatus::from_raw(7 << 8)), 7);
        assert_eq!(shell_status(ExitStatus::from_raw(9)), 137);
    }
}
