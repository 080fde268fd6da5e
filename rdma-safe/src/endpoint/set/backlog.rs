//! Messages that wait for their endpoint's turn.

use crate::endpoint::Completion;

/// The waiting messages of all endpoints: one linked list for each, in one allocation.
#[derive(Default)]
pub(super) struct Backlogs {
    nodes: Vec<Node>,
    /// Head of the list of empty nodes.
    empty: Option<u32>,
}

struct Node {
    message: Option<Completion>,
    next: Option<u32>,
}

/// The messages of one endpoint, oldest first.
#[derive(Default)]
pub(super) struct Backlog {
    ends: Option<Ends>,
    len: u32,
}

#[derive(Clone, Copy)]
struct Ends {
    first: u32,
    last: u32,
}

impl Backlog {
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Backlogs {
    /// Allocates nodes for `messages` in all, so that [`Backlogs::push`] need not.
    pub(super) fn reserve(&mut self, messages: u32) {
        while self.nodes.len() < messages as usize {
            self.add_node();
        }
    }

    fn add_node(&mut self) -> u32 {
        // At most one node for each receive of the pools, whose count fits into 32 bits.
        let index = self.nodes.len() as u32;
        self.nodes.push(Node { message: None, next: self.empty });
        self.empty = Some(index);
        index
    }

    pub(super) fn push(&mut self, to: &mut Backlog, message: Completion) {
        let index = match self.empty {
            Some(index) => index,
            None => self.add_node(),
        };
        let node = &mut self.nodes[index as usize];
        self.empty = node.next.take();
        node.message = Some(message);
        to.len += 1;
        to.ends = Some(match to.ends {
            None => Ends { first: index, last: index },
            Some(Ends { first, last }) => {
                self.nodes[last as usize].next = Some(index);
                Ends { first, last: index }
            }
        });
    }

    pub(super) fn pop(&mut self, from: &mut Backlog) -> Option<Completion> {
        let Ends { first, last } = from.ends?;
        let node = &mut self.nodes[first as usize];
        let message = node.message.take();
        let next = std::mem::replace(&mut node.next, self.empty);
        self.empty = Some(first);
        from.len -= 1;
        from.ends = next.map(|next| Ends { first: next, last });
        message
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::Operation;
    use crate::endpoint::poll::Outcome;

    fn message(number: u64) -> Completion {
        Completion::new(number, Operation::Receive, None, Outcome::DONE)
    }

    #[test]
    fn each_list_keeps_its_order_and_nodes_are_reused() {
        let mut all = Backlogs::default();
        all.reserve(4);
        let mut lists = [Backlog::default(), Backlog::default()];
        for round in 0..3 {
            for number in 0..2 {
                all.push(&mut lists[0], message(round * 10 + number));
                all.push(&mut lists[1], message(round * 10 + 5 + number));
            }
            assert_eq!([lists[0].len(), lists[1].len()], [2, 2]);
            for (list, base) in lists.iter_mut().zip([0, 5]) {
                let ids: Vec<_> = std::iter::from_fn(|| all.pop(list)).map(|message| message.id).collect();
                assert_eq!(ids, [0, 1].map(|number| message(round * 10 + base + number).id));
                assert!(list.is_empty());
            }
        }
        assert_eq!(all.nodes.len(), 4);
        for number in 0..6 {
            all.push(&mut lists[1], message(number));
        }
        assert_eq!((all.nodes.len(), lists[1].len()), (6, 6));
    }
}
