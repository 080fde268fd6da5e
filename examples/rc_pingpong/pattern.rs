//! What `-c` checks.

/// What C fills its message with.
const FILL: u8 = 0x7b;
/// What it puts at the start of each page.
const MARK: u8 = 0;

/// Fills a message as C does; with marks, or, when it is not to be checked, without.
pub(crate) fn fill(message: &mut [u8], page: usize, marked: bool) {
    message.fill(FILL);
    if marked {
        message.iter_mut().step_by(page).for_each(|byte| *byte = MARK);
    }
}

/// The pages that do not hold what [`fill`] put there. C looks at the first byte of each only.
pub(crate) fn invalid_pages(message: &[u8], page: usize) -> impl Iterator<Item = usize> {
    let is_valid = |bytes: &[u8]| bytes[0] == MARK && bytes[1..].iter().all(|byte| *byte == FILL);
    message.chunks(page).enumerate().filter(move |(_, bytes)| !is_valid(bytes)).map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_with_one_wrong_byte_is_found() {
        let mut message = vec![0; 4096 * 2 + 1];
        assert_eq!(invalid_pages(&message, 4096).collect::<Vec<_>>(), [0, 1], "nothing arrived, but for the last byte");
        fill(&mut message, 4096, false);
        assert_eq!(invalid_pages(&message, 4096).collect::<Vec<_>>(), [0, 1, 2]);
        fill(&mut message, 4096, true);
        assert_eq!(message.iter().filter(|byte| **byte == 0).count(), 3);
        assert_eq!(invalid_pages(&message, 4096).count(), 0);
        message[8191] = 0;
        assert_eq!(invalid_pages(&message, 4096).collect::<Vec<_>>(), [1]);
    }
}
