//! The threads of the process.

use std::fs;

/// Whether all threads except the calling one sleep: the state `S` of proc_pid_stat(5).
pub(super) fn all_others_sleep() -> bool {
    // SAFETY: the call has no arguments.
    let own = unsafe { libc::gettid() }.to_string();
    let Ok(tasks) = fs::read_dir("/proc/self/task") else { return false };
    tasks.flatten().filter(|task| *task.file_name() != *own).all(|task| {
        // A thread that has ended since it was listed does not run.
        fs::read_to_string(task.path().join("stat")).map_or(true, |stat| sleeps(&stat))
    })
}

/// The name of the program, in parentheses, may contain any character. The state follows it.
fn sleeps(stat: &str) -> bool {
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('S'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_follows_the_name() {
        assert!(sleeps("7 (a) R (b) S 1 7 7 0"));
        assert!(!sleeps("7 (a S b) R 1 7 7 0"));
        assert!(!sleeps("7"));
    }
}
