//! The stages: what each needs, which belong to the quick tests, and how long each takes.

use clap::ValueEnum;

/// A part of `cargo xtask test`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, clap::ValueEnum)]
pub(super) enum Stage {
    /// cargo fmt --check
    Fmt,
    /// Compile all tests and examples
    Build,
    /// Tests that need no device: unit, property, parity, compile-fail
    Unit,
    /// Tests on an RDMA device, on soft0, the software RNIC of this workspace
    Soft,
    /// Tests on an RDMA device, on SoftRoCE
    Device,
    /// The connection manager of soft0: its states, random runs and hostile peers; 10 000 HTTP/2 streams for a minute; in a
    /// release build
    Explore,
    /// cargo clippy with warnings denied
    Clippy,
    /// Examples in the documentation
    Doctest,
    /// The documentation, with warnings denied
    Docs,
    /// The committed bindings are what the generator writes
    Drift,
    /// The published crates can be packaged and compile from their packages
    Package,
    /// The libraries compile for 64-bit Arm
    Aarch64,
    /// Everything compiles with the oldest Rust that the manifest promises
    Msrv,
    /// Instructions of the data path keep their limits
    Overhead,
    /// The code that Miri can run
    Miri,
    /// Safe programs over soft0 under ThreadSanitizer and AddressSanitizer
    Sanitize,
    /// Programs from Debian's packages on soft0, such as UCX, perftest and fio; downloads them
    Foreign,
    /// Tests between two hosts, each a guest
    Hosts,
}

impl Stage {
    pub(super) fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(|| format!("{self:?}"), |value| value.get_name().to_owned())
    }

    /// Whether `cargo xtask test` runs the stage without `--full`.
    pub(super) fn is_quick(self) -> bool {
        use Stage::{Build, Clippy, Device, Docs, Doctest, Fmt, Soft, Unit};
        matches!(self, Fmt | Build | Unit | Soft | Device | Clippy | Doctest | Docs)
    }

    /// Whether the stage runs the test programs that [`Stage::Build`] compiles.
    pub(super) fn needs_build(self) -> bool {
        matches!(self, Stage::Unit | Stage::Soft | Stage::Foreign | Stage::Device | Stage::Hosts)
    }

    /// Whether the stage compiles into the usual target directory, which only one cargo at a time can lock.
    pub(super) fn compiles(self) -> bool {
        use Stage::{Build, Clippy, Docs, Doctest, Drift};
        matches!(self, Build | Clippy | Doctest | Docs | Drift)
    }

    /// Stages with a lower number start first.
    ///
    /// The longest stages come first, so that the shorter ones fill both processors at the end. The build and the unit
    /// tests precede them: other stages need the build, and a failed unit test should be reported early.
    pub(super) fn priority(self) -> u8 {
        match self {
            Stage::Build => 0,
            Stage::Fmt | Stage::Unit => 1,
            Stage::Device | Stage::Hosts => 2,
            Stage::Miri => 3,
            _ => 4,
        }
    }

    /// Whether the stage may boot guests.
    pub(super) fn boots_guests(self) -> bool {
        matches!(self, Stage::Device | Stage::Hosts)
    }

    /// Expected seconds on two processors. Used until a run has been timed.
    pub(super) fn estimate(self, is_full: bool) -> u64 {
        match self {
            Stage::Fmt => 2,
            Stage::Build => 120,
            Stage::Unit | Stage::Docs | Stage::Drift => 40,
            Stage::Soft if is_full => 240,
            Stage::Soft | Stage::Clippy | Stage::Package | Stage::Msrv | Stage::Overhead => 90,
            Stage::Device if is_full => 1200,
            Stage::Device => 400,
            Stage::Doctest | Stage::Aarch64 => 30,
            Stage::Miri => 1200,
            Stage::Sanitize | Stage::Foreign | Stage::Hosts => 180,
            Stage::Explore => 420,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_is_called_as_on_the_command_line() {
        assert_eq!(Stage::Aarch64.name(), "aarch64");
        assert_eq!(Stage::value_variants().len(), 18);
    }
}
