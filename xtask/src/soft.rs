//! `cargo xtask soft`: runs a program on the software RNIC of this workspace.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{process, workspace};

const EXAMPLES: &str = "\
Examples:
  cargo xtask soft -- ibv_devinfo -v
  cargo xtask soft -- ibv_rc_pingpong -g 0              the server; in another shell, the client:
  cargo xtask soft -- ibv_rc_pingpong -g 0 localhost
  cargo xtask soft --faults seed=7,drop=0.01,delay=50us -- ib_write_bw
  cargo xtask soft --addr 10.0.0.1 -- ib_send_lat       reachable from other hosts and other RNICs
  cargo xtask soft --check my-program                   reports misuse of RDMA memory, queues and keys; status 66
  cargo xtask soft --check=backtrace,suppress=overlap my-program";

/// Run a program that uses libibverbs, in any language, on soft0: a software RNIC in the program's own process
///
/// LD_PRELOAD, RDMA_SYS_LIBIBVERBS and RDMA_SYS_LIBRDMACM replace libibverbs and librdmacm, so the program sees no other
/// device. Its input, output and exit status are passed through. Programs on one machine reach each other without --addr.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Faults of the simulated network, such as seed=7,drop=0.01,dup=0.001,reorder=0.01,corrupt=0.0001,delay=50us; each
    /// is optional (RDMA_SOFT_FAULTS)
    #[arg(long, value_name = "TEXT")]
    faults: Option<String>,
    /// Comma-separated addresses of this machine for the device [default: a free one of 127.0.0.0/8] (RDMA_SOFT_ADDR)
    #[arg(long, value_name = "IP")]
    addr: Option<String>,
    /// Report misuse of memory, queues and keys on standard error (RDMA_SOFT_CHECK). OPTIONS are separated by commas:
    /// backtrace, suppress=KIND,KIND, text=FILE, json=FILE, exit=N, bytes=N, memlock=N, limit=N; see docs/soft.md
    #[arg(long, value_name = "OPTIONS", num_args = 0..=1, require_equals = true, default_missing_value = "1")]
    check: Option<String>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Replaces this process with the program. Returns only if the program cannot be started.
pub(crate) fn main(args: &Args) -> Result<i32> {
    let library = library()?;
    let mut command = args.command(&library, std::env::var_os("LD_PRELOAD"))?;
    let error = command.exec();
    let advice = if args.has_separate_options() {
        "; options of the checker follow an equals sign: --check=OPTIONS"
    } else {
        ""
    };
    eprintln!("error: cannot run `{}`: {error}{advice}", process::display(&command));
    Ok(process::spawn_error_status(&error))
}

/// Compiles the library and returns its path.
pub(crate) fn library() -> Result<std::path::PathBuf> {
    let mut cargo = Command::new(workspace::cargo());
    cargo.current_dir(workspace::root()).args(["build", "--quiet", "--release", "--package", "rdma-soft-preload"]);
    process::run(&mut cargo)?;
    Ok(workspace::target_dir()?.join("release/librdma_soft.so"))
}

/// Preloads the library into `command` in place of libibverbs, before the libraries in `others`.
///
/// # Errors
/// If the path contains a space or a colon, which separate paths in `LD_PRELOAD`.
pub(crate) fn preload(command: &mut Command, library: &Path, others: Option<OsString>) -> Result<()> {
    let name = library.as_os_str();
    if name.as_encoded_bytes().iter().any(|byte| b" :".contains(byte)) {
        bail!("LD_PRELOAD cannot name {}, which contains a space or a colon: set CARGO_TARGET_DIR", library.display());
    }
    let mut preload = name.to_owned();
    if let Some(others) = others.filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    command.env("LD_PRELOAD", preload).env("RDMA_SYS_LIBIBVERBS", name).env("RDMA_SYS_LIBRDMACM", name);
    Ok(())
}

impl Args {
    /// Whether the command looks like `OPTIONS -- PROGRAM` after `--check`.
    fn has_separate_options(&self) -> bool {
        self.check.as_deref() == Some("1") && self.command.get(1).is_some_and(|word| word == "--")
    }

    fn command(&self, library: &Path, preloaded: Option<OsString>) -> Result<Command> {
        let (program, arguments) = self.command.split_first().context("no program")?;
        let mut command = Command::new(program);
        command.args(arguments);
        preload(&mut command, library, preloaded)?;
        for (variable, value) in
            [("RDMA_SOFT_FAULTS", &self.faults), ("RDMA_SOFT_ADDR", &self.addr), ("RDMA_SOFT_CHECK", &self.check)]
        {
            if let Some(value) = value {
                command.env(variable, value);
            }
        }
        Ok(command)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::Cli;

    fn parse(words: &[&str]) -> Args {
        match Cli::try_parse_from(["xtask", "soft"].iter().chain(words)).unwrap() {
            Cli { command: crate::Command::Soft(args) } => args,
            other => panic!("{other:?}"),
        }
    }

    fn variable(command: &Command, name: &str) -> Option<String> {
        let (_, value) = command.get_envs().find(|(variable, _)| *variable == name)?;
        value.map(|value| value.to_string_lossy().into_owned())
    }

    #[test]
    fn the_program_gets_the_preloaded_library_and_options_as_variables() {
        let args =
            parse(&["--faults", "drop=0.01", "--addr", "10.0.0.1", "--", "ibv_rc_pingpong", "-g", "0", "--addr"]);
        let command = args.command(Path::new("/t/librdma_soft.so"), Some("/l/other.so".into())).unwrap();
        assert_eq!(process::display(&command), "ibv_rc_pingpong -g 0 --addr");
        assert_eq!(variable(&command, "LD_PRELOAD").as_deref(), Some("/t/librdma_soft.so:/l/other.so"));
        assert_eq!(variable(&command, "RDMA_SYS_LIBIBVERBS").as_deref(), Some("/t/librdma_soft.so"));
        assert_eq!(variable(&command, "RDMA_SOFT_FAULTS").as_deref(), Some("drop=0.01"));
        assert_eq!(variable(&command, "RDMA_SOFT_ADDR").as_deref(), Some("10.0.0.1"));
        let plain = parse(&["ibv_devinfo", "-v"]).command(Path::new("/t/librdma_soft.so"), None).unwrap();
        assert_eq!(variable(&plain, "LD_PRELOAD").as_deref(), Some("/t/librdma_soft.so"));
        assert_eq!(variable(&plain, "RDMA_SOFT_FAULTS"), None, "without the option, the inherited variable applies");
    }

    #[test]
    fn the_checker_has_options_and_defaults() {
        let check = |words: &[&str]| {
            // With and without the separator, and before the words of the program, which may look like options.
            let [found, other] = [&["--", "true", "--check=no"][..], &["true", "--check=no"]].map(|program| {
                let command = parse(&[words, program].concat()).command(Path::new("/t/librdma_soft.so"), None).unwrap();
                assert_eq!(process::display(&command), "true --check=no");
                variable(&command, "RDMA_SOFT_CHECK")
            });
            assert_eq!(found, other);
            found
        };
        assert_eq!(check(&[]), None);
        assert_eq!(check(&["--check"]).as_deref(), Some("1"));
        assert_eq!(check(&["--check=backtrace,exit=9"]).as_deref(), Some("backtrace,exit=9"));
    }

    #[test]
    fn options_without_an_equals_sign_are_recognised() {
        assert!(parse(&["--check", "backtrace", "--", "true"]).has_separate_options());
        for words in [&["--check", "--", "true"][..], &["--check", "true"], &["--check=backtrace", "--", "true", "--"]]
        {
            assert!(!parse(words).has_separate_options(), "{words:?}");
        }
    }

    #[test]
    fn a_library_that_cannot_be_preloaded_is_an_error() {
        let error = parse(&["true"]).command(Path::new("/my work/librdma_soft.so"), None).unwrap_err();
        assert!(error.to_string().contains("CARGO_TARGET_DIR"), "{error}");
    }
}
