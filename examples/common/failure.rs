//! What a program says before it gives up.

use std::error::Error;

/// The error and its causes in one line.
pub(crate) fn one_line(error: &(dyn Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line = format!("{line}: {error}");
        cause = error.source();
    }
    line.lines().map(str::trim).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::one_line;
    use std::fmt;

    #[derive(Debug)]
    struct Outer(std::io::Error);

    impl fmt::Display for Outer {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("cannot do it\n  at all")
        }
    }

    impl std::error::Error for Outer {
        fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
            Some(&self.0)
        }
    }

    #[test]
    fn causes_follow_on_the_same_line() {
        let error = Outer(std::io::Error::other("the disk is full"));
        assert_eq!(one_line(&error), "cannot do it at all: the disk is full");
        assert_eq!(one_line(&std::io::Error::other("cannot do it")), "cannot do it");
    }
}
