//! Error messages.

use std::error::Error;

/// Prints the error of the program `name` on standard error.
pub fn print(name: &str, error: &(dyn Error + 'static)) {
    eprintln!("{name}: {}", one_line(error));
}

/// Formats the error and its causes in one line. Escapes control characters: a peer may have sent part of the text.
pub fn one_line(error: &(dyn Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line = format!("{line}: {error}");
        cause = error.source();
    }
    let line = line.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    let shown = |letter: char| if letter.is_control() { letter.escape_default().to_string() } else { letter.into() };
    line.chars().map(shown).collect()
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

    #[test]
    fn control_characters_are_escaped() {
        let error = std::io::Error::other("refused: \x1b]0;all is well\x07\u{9b}2J, \rgrüße");
        assert_eq!(one_line(&error), r"refused: \u{1b}]0;all is well\u{7}\u{9b}2J, \rgrüße");
    }
}
