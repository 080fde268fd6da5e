//! Polls for a condition, with a time limit.

use std::thread;
use std::time::{Duration, Instant};

/// Calls `ready` until it returns a value, or until `limit` has passed.
pub(crate) fn until<T>(limit: Duration, mut ready: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = ready() {
            return Some(value);
        }
        if Instant::now() >= deadline {
            return None;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_ends_with_a_value_or_at_the_limit() {
        let mut calls = 0;
        let third = until(Duration::from_secs(60), || {
            calls += 1;
            (calls == 3).then_some(calls)
        });
        assert_eq!(third, Some(3));
        assert_eq!(until(Duration::ZERO, || None::<()>), None);
    }
}
