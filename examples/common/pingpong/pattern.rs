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

/// The pages that do not begin with a mark.
///
/// As in C, the bytes in between are not looked at: with `-N`, C asks for inline data and sets an element instead, for
/// which the rxe provider sends the bytes of the element's address. They begin with a zero, too.
pub(crate) fn invalid_pages(message: &[u8], page: usize) -> impl Iterator<Item = usize> {
    message.iter().step_by(page).enumerate().filter(|(_, byte)| **byte != MARK).map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_did_not_arrive_is_found() {
        let mut message = vec![0; 4096 * 2 + 1];
        fill(&mut message, 4096, false);
        assert_eq!(invalid_pages(&message, 4096).collect::<Vec<_>>(), [0, 1, 2], "nothing has arrived");
        fill(&mut message, 4096, true);
        assert_eq!(message.iter().filter(|byte| **byte == 0).count(), 3);
        assert_eq!(invalid_pages(&message, 4096).count(), 0);
        message[4096] = FILL;
        assert_eq!(invalid_pages(&message, 4096).collect::<Vec<_>>(), [1]);
    }
}
