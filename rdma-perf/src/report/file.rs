//! Result files.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::{FORMAT, Report, csv};

/// A file that cannot be written or read. The message includes the cause, so there is no `source`.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    #[error("`{path}` has no known extension: use .json or .csv")]
    Name { path: PathBuf },
    #[error("cannot write `{path}`: {reason}")]
    Write { path: PathBuf, reason: io::Error },
    #[error("cannot read `{path}`: {reason}")]
    Read { path: PathBuf, reason: io::Error },
    #[error("`{path}` is not JSON ({reason}): give a file that `--output FILE.json` wrote")]
    NotJson { path: PathBuf, reason: serde_json::Error },
    #[error("`{path}` is JSON, but not written by rdma-perf: give a file that `--output FILE.json` wrote")]
    NotResults { path: PathBuf },
    #[error(
        "`{path}` has format {found}, but this version reads format {FORMAT}: measure again, or read it with {wrote}"
    )]
    Format { path: PathBuf, found: u64, wrote: String },
    #[error("`{path}` is damaged: {reason}")]
    Damaged { path: PathBuf, reason: serde_json::Error },
    #[error("`{path}` has no rows: its run ended before the first size was measured")]
    NoRows { path: PathBuf },
}

/// Format of a result file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Form {
    Json,
    Csv,
}

impl Form {
    /// Chooses the format by the extension.
    pub(crate) fn of(path: &Path) -> Result<Form, FileError> {
        match path.extension().and_then(|extension| extension.to_str()).map(str::to_ascii_lowercase).as_deref() {
            Some("json") => Ok(Form::Json),
            Some("csv") => Ok(Form::Csv),
            _ => Err(FileError::Name { path: path.into() }),
        }
    }
}

impl Report {
    /// The text of a result file.
    pub(crate) fn to_text(&self, form: Form) -> String {
        match form {
            // Serialization to memory fails only for maps with keys other than strings, and there are none.
            Form::Json => serde_json::to_string_pretty(self).unwrap_or_default() + "\n",
            Form::Csv => csv::text(self),
        }
    }

    /// Writes JSON or CSV, depending on the extension of `path`. The file is replaced atomically.
    pub(crate) fn save(&self, path: &Path) -> Result<(), FileError> {
        let text = self.to_text(Form::of(path)?);
        replace(path, text.as_bytes()).map_err(|reason| FileError::Write { path: path.into(), reason })
    }

    /// Reads a JSON file written by [`Report::save`].
    pub(crate) fn load(path: &Path) -> Result<Report, FileError> {
        let text = fs::read_to_string(path).map_err(|reason| FileError::Read { path: path.into(), reason })?;
        let value: serde_json::Value =
            serde_json::from_str(&text).map_err(|reason| FileError::NotJson { path: path.into(), reason })?;
        // The format number is checked first, because other fields may be unknown to this version.
        let format = value.get("format").and_then(serde_json::Value::as_u64);
        let found = format.ok_or_else(|| FileError::NotResults { path: path.into() })?;
        if found != u64::from(FORMAT) {
            let version =
                value.get("version").and_then(serde_json::Value::as_str).unwrap_or("of the version that wrote it");
            return Err(FileError::Format { path: path.into(), found, wrote: format!("rdma-perf {version}") });
        }
        let report: Report =
            serde_json::from_value(value).map_err(|reason| FileError::Damaged { path: path.into(), reason })?;
        if report.rows.is_empty() {
            return Err(FileError::NoRows { path: path.into() });
        }
        Ok(report)
    }
}

/// Fails if [`replace`] would fail. Called before measuring, so that no results are lost.
pub(crate) fn check_writable(path: &Path) -> Result<(), FileError> {
    let check = || match Target::of(path)? {
        // Opening a pipe would block until it has a reader.
        Target::Other(target) => Ok(rustix::fs::access(&target, rustix::fs::Access::WRITE_OK)?),
        Target::File { temporary, .. } => {
            File::create(&temporary)?;
            fs::remove_file(&temporary)
        }
    };
    check().map_err(|reason| FileError::Write { path: path.into(), reason })
}

/// The target of a write.
enum Target {
    /// A regular file, which may not exist yet, and a temporary file beside it.
    File { target: PathBuf, temporary: PathBuf },
    /// A target that cannot be replaced, such as /dev/stdout or a pipe.
    Other(PathBuf),
}

impl Target {
    fn of(path: &Path) -> io::Result<Self> {
        // Links are followed.
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.into());
        match fs::metadata(&target) {
            Ok(metadata) if metadata.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
            Ok(metadata) if !metadata.is_file() => return Ok(Target::Other(target)),
            _ => {}
        }
        let mut name = OsString::from(".");
        name.push(target.file_name().ok_or_else(|| io::Error::other("it has no file name"))?);
        name.push(format!(".{}", std::process::id()));
        Ok(Target::File { temporary: target.with_file_name(name), target })
    }
}

/// Writes a temporary file beside `path` and renames it, so that readers see either the old or the new content.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let (target, temporary) = match Target::of(path)? {
        Target::Other(target) => return File::options().write(true).open(&target)?.write_all(bytes),
        Target::File { target, temporary } => (target, temporary),
    };
    let written = File::create(&temporary)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&temporary, &target));
    if written.is_err() {
        // An error of this removal would hide the first error.
        _ = fs::remove_file(&temporary);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::sample;
    use crate::testing::scratch::Scratch;

    #[test]
    fn a_saved_report_can_be_loaded() {
        let scratch = Scratch::new();
        let path = scratch.path("run.json");
        for arguments in ["write bw host -a -b --validate --rate 10Gb/s", "send lat host --compat perftest"] {
            let report = sample::report(arguments, "first \u{1f600} \"run\"");
            report.save(&path).unwrap();
            let loaded = Report::load(&path).unwrap();
            assert_eq!((loaded.label.as_str(), &loaded.plan), (report.label.as_str(), &report.plan));
            assert_eq!(loaded.rows.len(), report.rows.len());
            let sums = [&report, &loaded].map(|report| report.rows.iter().map(|row| row.seconds).sum::<f64>());
            assert!((sums[0] - sums[1]).abs() < 1e-12, "{sums:?}");
        }
        assert_eq!(fs::read_dir(scratch.path("")).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn the_extension_chooses_the_format() {
        let scratch = Scratch::new();
        let report = sample::report("send lat host", "run");
        let path = scratch.path("run.CSV");
        report.save(&path).unwrap();
        assert_eq!(fs::read_to_string(path).unwrap(), csv::text(&report));
        let error = report.save(&scratch.path("run.txt")).unwrap_err().to_string();
        assert!(error.contains(".json or .csv"), "{error}");
        assert!(Form::of(Path::new("json")).is_err());
    }

    #[test]
    fn errors_of_reading_name_the_cause() {
        let scratch = Scratch::new();
        let path = scratch.path("run.json");
        let load = |text: &str| {
            fs::write(&path, text).unwrap();
            Report::load(&path).unwrap_err().to_string()
        };
        assert!(load("size,messages").contains("is not JSON"));
        assert!(load("{\"results\":1}").contains("not written by rdma-perf"));
        assert!(load("[]").contains("not written by rdma-perf"));
        let error = load("{\"format\":2,\"version\":\"0.9.0\"}");
        assert!(error.contains("has format 2") && error.contains("rdma-perf 0.9.0"), "{error}");
        assert!(load("{\"format\":1}").contains("damaged: missing field"));
        let mut report = sample::report("send lat host", "run");
        report.rows.clear();
        assert!(load(&report.to_text(Form::Json)).contains("no rows"));
        let error = anyhow::Error::from(Report::load(&scratch.path("none.json")).unwrap_err());
        assert_eq!(format!("{error:#}").matches("No such file").count(), 1, "{error:#}");
    }

    #[test]
    fn a_failed_write_leaves_the_old_file() {
        let scratch = Scratch::new();
        let report = sample::report("send lat host", "run");
        let error = report.save(&scratch.path("missing/run.json")).unwrap_err().to_string();
        assert!(error.contains("cannot write") && error.contains("No such file"), "{error}");
        let target = scratch.path("real.json");
        fs::write(&target, "old").unwrap();
        let link = scratch.path("link.json");
        std::os::unix::fs::symlink(&target, &link).unwrap();
        report.save(&link).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink(), "the link is kept");
        assert!(Report::load(&target).is_ok());
    }

    #[test]
    fn unwritable_files_are_detected_before_the_run() {
        let scratch = Scratch::new();
        let path = scratch.path("run.json");
        check_writable(&path).unwrap();
        assert_eq!(fs::read_dir(scratch.path("")).unwrap().count(), 0, "no file is left");
        fs::write(&path, "old").unwrap();
        check_writable(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        check_writable(Path::new("/dev/null")).unwrap();
        let refused = |path: &Path| check_writable(path).unwrap_err().to_string();
        assert!(refused(&scratch.path("missing/run.json")).contains("No such file"));
        assert!(refused(&scratch.path("")).contains("is a directory"), "{}", refused(&scratch.path("")));
        assert!(refused(&path.join("run.json")).contains("Not a directory"), "{}", refused(&path.join("run.json")));
    }
}
