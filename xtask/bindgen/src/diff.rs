//! A short summary of the difference between two files.

/// Lists lines that only one of the two files has, or the first line that differs.
pub(crate) fn summary(name: &str, committed: &str, generated: &str) -> String {
    const SHOWN: usize = 20;
    let only = |left: &str, right: &str| {
        let mut others: Vec<&str> = right.lines().collect();
        others.sort_unstable();
        left.lines().filter(|line| others.binary_search(line).is_err()).map(str::to_owned).collect::<Vec<_>>()
    };
    let gone = only(committed, generated);
    let new = only(generated, committed);
    let mut text = format!(
        "rdma-sys/{name} is stale: {} lines only in the committed file, {} only in the generated one",
        gone.len(),
        new.len()
    );
    for (sign, lines) in [('-', &gone), ('+', &new)] {
        for line in lines.iter().take(SHOWN) {
            text.push_str(&format!("\n  {sign} {}", line.trim()));
        }
        if lines.len() > SHOWN {
            text.push_str(&format!("\n  {sign} ... and {} more", lines.len() - SHOWN));
        }
    }
    if gone.is_empty() && new.is_empty() {
        let at = committed.lines().zip(generated.lines()).take_while(|(a, b)| a == b).count() + 1;
        text.push_str(&format!("\n  the same lines in a different order from line {at} on"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::summary;

    #[test]
    fn a_summary_lists_the_lines_of_one_side() {
        let text = summary("src/x.rs", "a\nb\n", "a\nc\nd\n");
        assert!(text.contains("1 lines only in the committed file, 2 only in the generated one"), "{text}");
        assert!(text.contains("- b") && text.contains("+ c") && text.contains("+ d"), "{text}");
        assert!(!text.contains("- a"), "{text}");
    }

    #[test]
    fn a_different_order_is_reported() {
        let text = summary("src/x.rs", "a\nb\nc\n", "a\nc\nb\n");
        assert!(text.contains("different order from line 2"), "{text}");
    }
}
