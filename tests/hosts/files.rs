//! Files with known contents.

use std::fs;
use std::path::{Path, PathBuf};

/// A directory that exists as long as this value.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("hosts-{name}"));
        fs::create_dir_all(&path).expect("the directory can be created");
        Scratch(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Pseudo-random contents of a file, the same on both hosts. `seed` selects them.
pub(crate) fn contents(size: usize, seed: u64) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64.wrapping_mul(2 * seed + 1);
    let mut bytes = Vec::with_capacity(size + 8);
    while bytes.len() < size {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(size);
    bytes
}
