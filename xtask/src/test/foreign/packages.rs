//! Debian packages, unpacked below the target directory without being installed.

use std::env::consts::ARCH;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::apt::{self, Apt};
use crate::{process, soft, workspace};

/// Packages to unpack, together with their dependencies.
const PROGRAMS: [&str; 9] = [
    "ucx-utils",
    "openmpi-bin",
    "rdmacm-utils",
    "ibverbs-utils",
    "perftest",
    "libfabric-bin",
    "fio",
    "curl",
    "nghttp2-client",
];
/// A program of each package, and an argument with which it succeeds, if there is one.
const PROOFS: [(&str, Option<&str>); 9] = [
    ("ucx_info", Some("-v")),
    ("orterun", Some("--version")),
    ("rping", None),
    ("ibv_rc_pingpong", None),
    ("ib_send_bw", None),
    ("fi_info", Some("--version")),
    ("fio", Some("--version")),
    ("curl", Some("--version")),
    ("h2load", Some("--version")),
];
/// Packages that are needed for some of their files, also if they are installed: a header, and the Python package with its tests.
const FILES: [&str; 2] = ["libopenmpi-dev", "python3-pyverbs"];

/// The directory of the unpacked packages. It lacks packages that this machine has installed.
#[derive(Debug)]
pub(super) struct Root {
    path: PathBuf,
    /// The library that programs load in place of libibverbs.
    library: PathBuf,
    is_checked: bool,
}

impl Root {
    /// Downloads and unpacks the packages, unless an earlier run did.
    pub(super) fn get() -> Result<Root> {
        let path = workspace::target_dir()?.join("foreign").join(apt::codename());
        let root = Root { path, library: soft::library()?, is_checked: false };
        if root.check().is_err() {
            root.download().context("cannot download Debian's packages")?;
            root.check()?;
        }
        Ok(root)
    }

    /// Whether the checker of soft0 checks the programs.
    pub(super) fn is_checked(&self) -> bool {
        self.is_checked
    }

    pub(super) fn set_checked(&mut self, is_checked: bool) {
        self.is_checked = is_checked;
    }

    /// A path for a file of the tests.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.path.with_extension("files").join(name)
    }

    /// The include directory of `mpi.h`.
    pub(super) fn mpi_headers(&self) -> PathBuf {
        self.libraries().join("openmpi/include")
    }

    /// The directory of the Python package `pyverbs`.
    pub(super) fn python_packages(&self) -> PathBuf {
        self.path.join("usr/lib/python3/dist-packages")
    }

    /// The tests of rdma-core that use `pyverbs`. Some files are compressed.
    pub(super) fn pyverbs_tests(&self) -> PathBuf {
        self.path.join("usr/share/doc/rdma-core/tests")
    }

    /// The library that MPI programs link.
    pub(super) fn mpi_library(&self) -> PathBuf {
        let name = "libmpi.so.40";
        let unpacked = self.libraries().join(name);
        if unpacked.exists() { unpacked } else { system_libraries().join(name) }
    }

    /// A command that runs one of the programs on soft0.
    pub(super) fn command(&self, program: &str) -> Result<Command> {
        let mut command = self.plain_command(program);
        soft::preload(&mut command, &self.library, None)?;
        Ok(command)
    }

    /// Like [`Root::command`], without soft0.
    fn plain_command(&self, program: &str) -> Command {
        let mut command = Command::new(self.path_of(program));
        self.set_library_path(&mut command);
        let libraries = self.libraries();
        // These packages look for their modules and files where they would be installed.
        for (variable, place, proof) in [
            ("UCX_MODULE_DIR", libraries.join("ucx"), ""),
            ("OPAL_PREFIX", self.path.join("usr"), "bin/orterun"),
            ("PMIX_INSTALL_PREFIX", libraries.join("pmix2"), ""),
        ] {
            if place.join(proof).exists() {
                command.env(variable, place);
            }
        }
        command
    }

    /// The path of a program of the packages. Any other word stays as it is.
    pub(super) fn path_of(&self, word: &str) -> PathBuf {
        let unpacked = self.programs().join(word);
        if unpacked.is_file() { unpacked } else { word.into() }
    }

    /// The directory of the programs.
    pub(super) fn programs(&self) -> PathBuf {
        self.path.join("usr/bin")
    }

    /// Lets programs that `command` runs find the libraries of the packages.
    pub(super) fn set_library_path(&self, command: &mut Command) {
        let libraries = self.libraries();
        let paths = ["", "pmix2/lib", "ceph"].map(|name| libraries.join(name).display().to_string());
        command.env("LD_LIBRARY_PATH", paths.join(":"));
    }

    fn libraries(&self) -> PathBuf {
        self.path.join(system_libraries().strip_prefix("/").unwrap_or(Path::new("usr/lib")))
    }

    fn check(&self) -> Result<()> {
        for (program, argument) in PROOFS {
            let Some(argument) = argument else {
                if !self.programs().join(program).is_file() && process::find(program).is_none() {
                    bail!("{program} is missing");
                }
                continue;
            };
            process::output(self.plain_command(program).arg(argument))?;
        }
        for file in [self.mpi_headers().join("mpi.h"), self.pyverbs_tests().join("run_tests.py")] {
            if !file.is_file() {
                bail!("{} is missing", file.display());
            }
        }
        Ok(())
    }

    fn download(&self) -> Result<()> {
        println!("    downloading {} with apt-get", PROGRAMS.join(", "));
        // Another process may download at the same time. Each works in its own directory, and the last rename wins.
        let work = self.path.with_extension(format!("{}.tmp", std::process::id()));
        let result = download_in(&work);
        if result.is_ok() {
            _ = fs::remove_dir_all(&self.path);
            _ = fs::rename(work.join("root"), &self.path);
        }
        _ = fs::remove_dir_all(&work);
        result
    }
}

/// Library directories of the packages.
fn system_libraries() -> PathBuf {
    Path::new("/usr/lib").join(format!("{ARCH}-linux-gnu"))
}

/// Links a library of libfabric to the name that it is loaded by. Its package does that when it is installed.
fn link_psm(root: &Path) -> Result<()> {
    let library = Path::new("libpsm1/libpsm_infinipath.so.1.16");
    let name = root.join(system_libraries().strip_prefix("/")?).join("libpsm_infinipath.so.1");
    if root.join("usr/lib").join(library).exists() {
        std::os::unix::fs::symlink(Path::new("..").join(library), name)?;
    }
    Ok(())
}

fn download_in(work: &Path) -> Result<()> {
    let mut apt = Apt::new(work)?;
    let root = work.join("root");
    fs::create_dir_all(&root)?;
    for archive in apt.download_missing(&PROGRAMS)? {
        apt::unpack(&archive, &root)?;
    }
    for archive in apt.download(&FILES)? {
        apt::unpack(&archive, &root)?;
    }
    link_psm(&root)
}
