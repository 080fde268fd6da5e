//! The file that a transfer writes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use common::Result;
use rustix::fs::{CWD, FlockOperation, OFlags, RenameFlags, flock, renameat_with};
use sha2::{Digest, Sha256};

use crate::message::Checksum;

/// Longest file name in bytes.
pub(crate) const LONGEST_NAME: usize = 150;

/// Prefix and suffix of the name of a partial file.
const PARTIAL: (&str, &str) = (".", ".incoming");

/// A partial file, locked by this transfer.
pub(crate) struct Store {
    /// Path of the whole file.
    target: PathBuf,
    /// Path of the partial file. It stays after an interrupted transfer, and the next one resumes it.
    path: PathBuf,
    file: File,
    overwrite: bool,
    /// Number of bytes stored.
    at: u64,
    /// Hash of the bytes stored.
    hash: Sha256,
}

impl Store {
    /// Opens and locks the partial file of `name`.
    pub(crate) fn open(directory: &Path, name: &str, overwrite: bool) -> Result<Self> {
        require_plain(name)?;
        let target = directory.join(name);
        if !overwrite && target.symlink_metadata().is_ok() {
            return Err(format!("{name} already exists; the receiver replaces files only with --overwrite").into());
        }
        let path = directory.join(format!("{}{name}{}", PARTIAL.0, PARTIAL.1));
        let file = loop {
            // In a directory that other users can write to, one of them could place a symbolic link.
            let flags = OFlags::NOFOLLOW.bits() as i32;
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).custom_flags(flags);
            let file = options.open(&path)?;
            flock(&file, FlockOperation::NonBlockingLockExclusive)
                .map_err(|_| format!("another transfer of {name} is in progress"))?;
            // Another transfer may have finished in between and renamed the file.
            let (ours, there) = (file.metadata()?, path.metadata());
            if there.is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino())) {
                break file;
            }
        };
        Ok(Store { target, path, file, overwrite, at: 0, hash: Sha256::new() })
    }

    /// Reads the stored bytes. Returns their number and checksum. Calls `tick` at intervals.
    pub(crate) fn read(&mut self, tick: impl FnMut(u64) -> Result<()>) -> Result<(u64, Checksum)> {
        self.at = feed(&mut self.hash, &mut self.file, u64::MAX, tick)?;
        Ok((self.at, hexadecimal(&self.hash)))
    }

    /// Starts writing at byte `at`: after the stored bytes, or at 0, which discards them.
    pub(crate) fn start(&mut self, at: u64) -> Result<()> {
        if at == self.at {
            return Ok(());
        }
        if at != 0 {
            return Err(format!("the sender resumes at byte {at}, but {} bytes are stored", self.at).into());
        }
        self.file.set_len(0)?;
        io::Seek::rewind(&mut self.file)?;
        (self.at, self.hash) = (0, Sha256::new());
        Ok(())
    }

    /// Appends bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes)?;
        self.hash.update(bytes);
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Number of bytes stored.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// Compares the checksum, syncs the file, and gives it its name.
    pub(crate) fn finish(self, checksum: &str) -> Result<()> {
        let found = hexadecimal(&self.hash);
        if found != checksum {
            // Do not resume from a wrong file.
            self.file.set_len(0)?;
            return Err(format!("the file has the checksum {found} instead of {checksum}; send it again").into());
        }
        self.file.sync_all()?;
        let flags = if self.overwrite { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        renameat_with(CWD, &self.path, CWD, &self.target, flags).map_err(|errno| {
            format!("cannot rename the file to {}: {}", self.target.display(), io::Error::from(errno))
        })?;
        let directory = self.target.parent().filter(|parent| !parent.as_os_str().is_empty());
        fs::File::open(directory.unwrap_or(Path::new(".")))?.sync_all()?;
        Ok(())
    }
}

/// Rejects names that could lead out of the directory.
fn require_plain(name: &str) -> Result<()> {
    if name.is_empty() || name.len() > LONGEST_NAME {
        return Err(format!("a file name has 1 to {LONGEST_NAME} bytes, not {}", name.len()).into());
    }
    // Programs read some hidden files, as shells do in a home directory. Partial files are hidden as well.
    if name.starts_with('.') || name.chars().any(|letter| letter == '/' || letter.is_control()) {
        return Err(format!("{name:?} is not a valid file name").into());
    }
    Ok(())
}

/// Hashes at most `max` bytes of `from`, and returns their number. Calls `tick` with the number at intervals.
pub(crate) fn feed(
    hash: &mut Sha256,
    from: &mut impl Read,
    max: u64,
    mut tick: impl FnMut(u64) -> Result<()>,
) -> Result<u64> {
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    while at < max {
        let room = buffer.len().min(usize::try_from(max - at).unwrap_or(usize::MAX));
        match from.read(&mut buffer[..room]) {
            Ok(0) => break,
            Ok(read) => {
                hash.update(&buffer[..read]);
                at += read as u64;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
        tick(at)?;
    }
    Ok(at)
}

/// Formats the checksum of the bytes hashed so far.
pub(crate) fn hexadecimal(hash: &Sha256) -> Checksum {
    hash.clone().finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A temporary directory, removed on drop.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("file-transfer-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Scratch(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const OF_HELLO: &str = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";

    fn error_of<T>(result: Result<T>) -> String {
        result.err().expect("an error").to_string()
    }

    #[test]
    fn an_interrupted_transfer_is_resumed() {
        let scratch = Scratch::new("resume");
        let mut first = Store::open(&scratch.0, "greeting", false).unwrap();
        first.write(b"hel").unwrap();
        assert!(error_of(Store::open(&scratch.0, "greeting", false)).contains("another transfer of greeting"));
        drop(first);
        let mut second = Store::open(&scratch.0, "greeting", false).unwrap();
        assert_eq!(second.read(|_| Ok(())).unwrap().0, 3);
        assert!(error_of(second.start(2)).contains("byte 2"));
        second.start(3).unwrap();
        second.write(b"lo").unwrap();
        assert_eq!(second.at(), 5);
        second.finish(OF_HELLO).unwrap();
        assert_eq!(fs::read(scratch.0.join("greeting")).unwrap(), b"hello");
        assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 1, "the partial file is gone");
    }

    #[test]
    fn another_file_starts_at_0() {
        let scratch = Scratch::new("anew");
        let mut first = Store::open(&scratch.0, "greeting", false).unwrap();
        first.write(b"good bye").unwrap();
        drop(first);
        let mut second = Store::open(&scratch.0, "greeting", false).unwrap();
        second.read(|_| Ok(())).unwrap();
        second.start(0).unwrap();
        second.write(b"hello").unwrap();
        second.finish(OF_HELLO).unwrap();
        assert_eq!(fs::read(scratch.0.join("greeting")).unwrap(), b"hello");
    }

    #[test]
    fn a_file_with_a_wrong_checksum_is_not_renamed_and_not_resumed() {
        let scratch = Scratch::new("wrong");
        let mut store = Store::open(&scratch.0, "greeting", false).unwrap();
        store.write(b"hallo").unwrap();
        assert!(error_of(store.finish(OF_HELLO)).contains("checksum"));
        assert!(!scratch.0.join("greeting").exists());
        let mut second = Store::open(&scratch.0, "greeting", false).unwrap();
        assert_eq!(second.read(|_| Ok(())).unwrap().0, 0);
    }

    #[test]
    fn an_existing_file_is_replaced_only_with_overwrite() {
        let scratch = Scratch::new("replace");
        fs::write(scratch.0.join("greeting"), b"old").unwrap();
        assert!(error_of(Store::open(&scratch.0, "greeting", false)).contains("--overwrite"));
        let mut store = Store::open(&scratch.0, "greeting", true).unwrap();
        store.write(b"hello").unwrap();
        store.finish(OF_HELLO).unwrap();
        assert_eq!(fs::read(scratch.0.join("greeting")).unwrap(), b"hello");
        // A file that appears during the transfer is not replaced either.
        let mut late = Store::open(&scratch.0, "late", false).unwrap();
        late.write(b"hello").unwrap();
        fs::write(scratch.0.join("late"), b"mine").unwrap();
        assert!(error_of(late.finish(OF_HELLO)).contains("cannot rename the file"));
        assert_eq!(fs::read(scratch.0.join("late")).unwrap(), b"mine");
    }

    #[test]
    fn a_symbolic_link_in_place_of_the_partial_file_is_not_followed() {
        let scratch = Scratch::new("link");
        let elsewhere = scratch.0.join("elsewhere");
        fs::write(&elsewhere, b"mine").unwrap();
        std::os::unix::fs::symlink(&elsewhere, scratch.0.join(".greeting.incoming")).unwrap();
        assert!(Store::open(&scratch.0, "greeting", true).is_err());
        assert_eq!(fs::read(&elsewhere).unwrap(), b"mine");
    }

    #[test]
    fn names_that_lead_out_of_the_directory_are_rejected() {
        let long = "x".repeat(LONGEST_NAME + 1);
        for name in
            ["", ".", "..", "a/b", "/etc/passwd", "../a", "a\0", "a\nb", ".a.incoming", ".profile", "...", &long]
        {
            assert!(require_plain(name).is_err(), "{name:?}");
        }
        for name in ["a", "a b", "ä", "a..", "a.incoming"] {
            require_plain(name).unwrap();
        }
    }
}
