//! Where a file is put as it comes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FlockOperation, OFlags, RenameFlags, flock, renameat_with};
use sha2::{Digest, Sha256};

use crate::Result;
use crate::message::Checksum;

/// Most bytes of a file's name.
pub(crate) const LONGEST_NAME: usize = 150;

/// How the name of a file begins and ends that is not whole yet.
const UNFINISHED: (&str, &str) = (".", ".incoming");

/// A file that is not whole yet, and belongs to this transfer alone.
pub(crate) struct Store {
    /// Where it goes when it is whole,
    target: PathBuf,
    /// and where it is until then. What is left of a transfer that broke off is gone on with by the next.
    path: PathBuf,
    file: File,
    overwrite: bool,
    at: u64,
    hash: Sha256,
}

impl Store {
    /// For a file of that name.
    pub(crate) fn open(directory: &Path, name: &str, overwrite: bool) -> Result<Self> {
        require_plain(name)?;
        let target = directory.join(name);
        if !overwrite && target.symlink_metadata().is_ok() {
            return Err(format!("{name} is there already; the receiver replaces files with --overwrite only").into());
        }
        let path = directory.join(format!("{}{name}{}", UNFINISHED.0, UNFINISHED.1));
        let file = loop {
            // In a directory that others write to, a link of theirs would lead elsewhere.
            let flags = OFlags::NOFOLLOW.bits() as i32;
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).custom_flags(flags);
            let file = options.open(&path)?;
            flock(&file, FlockOperation::NonBlockingLockExclusive)
                .map_err(|_| format!("another transfer of {name} is going on"))?;
            // That other one may have ended in between, and given the file its name.
            let (ours, there) = (file.metadata()?, path.metadata());
            if there.is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino())) {
                break file;
            }
        };
        Ok(Store { target, path, file, overwrite, at: 0, hash: Sha256::new() })
    }

    /// Reads what is there already; how much that is, and its checksum. Calls `tick` now and then.
    pub(crate) fn read(&mut self, tick: impl FnMut(u64) -> Result<()>) -> Result<(u64, Checksum)> {
        self.at = feed(&mut self.hash, &mut self.file, u64::MAX, tick)?;
        Ok((self.at, hexadecimal(&self.hash)))
    }

    /// From now on bytes follow those that were read, or, with 0, replace them.
    pub(crate) fn start(&mut self, at: u64) -> Result<()> {
        if at == self.at {
            return Ok(());
        }
        if at != 0 {
            return Err(format!("the sender would go on at byte {at}, but {} are there", self.at).into());
        }
        self.file.set_len(0)?;
        io::Seek::rewind(&mut self.file)?;
        (self.at, self.hash) = (0, Sha256::new());
        Ok(())
    }

    /// Adds bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes)?;
        self.hash.update(bytes);
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// How many bytes are there.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// Gives the file its name, now that it is whole and lasts.
    pub(crate) fn finish(self, checksum: &str) -> Result<()> {
        let found = hexadecimal(&self.hash);
        if found != checksum {
            // To be gone on with is none of it.
            self.file.set_len(0)?;
            return Err(format!("the file has arrived with the checksum {found}, not {checksum}; send it again").into());
        }
        self.file.sync_all()?;
        let flags = if self.overwrite { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        renameat_with(CWD, &self.path, CWD, &self.target, flags)
            .map_err(|errno| format!("cannot name it {}: {}", self.target.display(), io::Error::from(errno)))?;
        let directory = self.target.parent().filter(|parent| !parent.as_os_str().is_empty());
        fs::File::open(directory.unwrap_or(Path::new(".")))?.sync_all()?;
        Ok(())
    }
}

/// That the name is one of a file in a directory, and no way out of it.
fn require_plain(name: &str) -> Result<()> {
    if name.is_empty() || name.len() > LONGEST_NAME {
        return Err(format!("a file's name has 1 to {LONGEST_NAME} bytes, not {}", name.len()).into());
    }
    // Programs read hidden ones unasked, as shells do in a home; what is not whole yet is hidden, too.
    if name.starts_with('.') || name.chars().any(|letter| letter == '/' || letter.is_control()) {
        return Err(format!("{name:?} is no name for a file here").into());
    }
    Ok(())
}

/// Adds at most `most` bytes of what `from` has; how many. Calls `tick` with that now and then.
pub(crate) fn feed(
    hash: &mut Sha256,
    from: &mut impl Read,
    most: u64,
    mut tick: impl FnMut(u64) -> Result<()>,
) -> Result<u64> {
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    while at < most {
        let room = buffer.len().min(usize::try_from(most - at).unwrap_or(usize::MAX));
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

/// The checksum of what was added so far.
pub(crate) fn hexadecimal(hash: &Sha256) -> Checksum {
    hash.clone().finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory that goes away.
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

    fn refusal<T>(result: Result<T>) -> String {
        result.err().expect("refused").to_string()
    }

    #[test]
    fn a_transfer_that_broke_off_is_gone_on_with() {
        let scratch = Scratch::new("resume");
        let mut first = Store::open(&scratch.0, "greeting", false).unwrap();
        first.write(b"hel").unwrap();
        assert!(refusal(Store::open(&scratch.0, "greeting", false)).contains("another transfer of greeting"));
        drop(first);
        let mut second = Store::open(&scratch.0, "greeting", false).unwrap();
        assert_eq!(second.read(|_| Ok(())).unwrap().0, 3);
        assert!(refusal(second.start(2)).contains("byte 2"));
        second.start(3).unwrap();
        second.write(b"lo").unwrap();
        assert_eq!(second.at(), 5);
        second.finish(OF_HELLO).unwrap();
        assert_eq!(fs::read(scratch.0.join("greeting")).unwrap(), b"hello");
        assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 1, "nothing is left");
    }

    #[test]
    fn what_is_another_file_is_begun_anew() {
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
    fn a_file_with_the_wrong_checksum_never_gets_its_name_and_is_not_gone_on_with() {
        let scratch = Scratch::new("wrong");
        let mut store = Store::open(&scratch.0, "greeting", false).unwrap();
        store.write(b"hallo").unwrap();
        assert!(refusal(store.finish(OF_HELLO)).contains("checksum"));
        assert!(!scratch.0.join("greeting").exists());
        let mut again = Store::open(&scratch.0, "greeting", false).unwrap();
        assert_eq!(again.read(|_| Ok(())).unwrap().0, 0);
    }

    #[test]
    fn a_file_that_is_there_is_replaced_only_when_told_to() {
        let scratch = Scratch::new("replace");
        fs::write(scratch.0.join("greeting"), b"old").unwrap();
        assert!(refusal(Store::open(&scratch.0, "greeting", false)).contains("--overwrite"));
        let mut store = Store::open(&scratch.0, "greeting", true).unwrap();
        store.write(b"hello").unwrap();
        store.finish(OF_HELLO).unwrap();
        assert_eq!(fs::read(scratch.0.join("greeting")).unwrap(), b"hello");
        // One that comes while another is received stays, too.
        let mut late = Store::open(&scratch.0, "late", false).unwrap();
        late.write(b"hello").unwrap();
        fs::write(scratch.0.join("late"), b"mine").unwrap();
        assert!(refusal(late.finish(OF_HELLO)).contains("cannot name it"));
        assert_eq!(fs::read(scratch.0.join("late")).unwrap(), b"mine");
    }

    #[test]
    fn a_link_in_the_place_of_what_is_not_whole_yet_is_not_followed() {
        let scratch = Scratch::new("link");
        let elsewhere = scratch.0.join("elsewhere");
        fs::write(&elsewhere, b"mine").unwrap();
        std::os::unix::fs::symlink(&elsewhere, scratch.0.join(".greeting.incoming")).unwrap();
        assert!(Store::open(&scratch.0, "greeting", true).is_err());
        assert_eq!(fs::read(&elsewhere).unwrap(), b"mine");
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
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
