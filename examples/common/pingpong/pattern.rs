//! The pattern in the messages that `-c` checks.

use rdma_safe::mr::Pages;

/// Byte that the C programs fill messages with.
const FILL: u8 = 0x7b;
/// Byte that they put at the start of each page.
const MARK: u8 = 0;

/// Fills a message as the C programs do. Without `marked`, no page is marked.
pub(super) fn fill(message: &mut [u8], marked: bool) {
    message.fill(FILL);
    if marked {
        message.iter_mut().step_by(Pages::page_size()).for_each(|byte| *byte = MARK);
    }
}

/// The pages that do not begin with a mark.
///
/// As in C, this does not check the bytes between the marks. With `-N`, the C program requests inline data and then sets a
/// scatter/gather element, and the rxe provider sends the bytes of the element's address. They begin with a zero as well.
pub(super) fn invalid_pages(message: &[u8]) -> impl Iterator<Item = usize> {
    message.iter().step_by(Pages::page_size()).enumerate().filter(|(_, byte)| **byte != MARK).map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unmarked_pages_are_found() {
        let page = Pages::page_size();
        let mut message = vec![0; page * 2 + 1];
        fill(&mut message, false);
        assert_eq!(invalid_pages(&message).collect::<Vec<_>>(), [0, 1, 2]);
        fill(&mut message, true);
        assert_eq!(message.iter().filter(|byte| **byte == MARK).count(), 3);
        assert_eq!(invalid_pages(&message).count(), 0);
        message[page] = FILL;
        assert_eq!(invalid_pages(&message).collect::<Vec<_>>(), [1]);
    }
}
