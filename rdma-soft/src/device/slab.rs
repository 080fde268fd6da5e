//! Objects by number.

/// Objects with small numbers. The number of a removed object is reused.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    slots: Vec<Option<T>>,
    free: Vec<u32>,
    first: u32,
}

impl<T> Slab<T> {
    /// Creates an empty slab, whose lowest number is `first`.
    pub(crate) const fn new(first: u32) -> Self {
        Slab { slots: Vec::new(), free: Vec::new(), first }
    }

    pub(crate) fn insert(&mut self, object: T) -> u32 {
        match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Some(object);
                self.first + slot
            }
            None => {
                self.slots.push(Some(object));
                self.first + (self.slots.len() - 1) as u32
            }
        }
    }

    fn slot(&self, number: u32) -> usize {
        number.wrapping_sub(self.first) as usize
    }

    pub(crate) fn get(&self, number: u32) -> Option<&T> {
        self.slots.get(self.slot(number))?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        let slot = self.slot(number);
        self.slots.get_mut(slot)?.as_mut()
    }

    pub(crate) fn remove(&mut self, number: u32) -> Option<T> {
        let slot = self.slot(number);
        let object = self.slots.get_mut(slot)?.take()?;
        self.free.push(slot as u32);
        Some(object)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        (self.first..).zip(&self.slots).filter_map(|(number, object)| Some((number, object.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_reused() {
        let mut slab = Slab::new(16);
        let [a, b] = ["a", "b"].map(|object| slab.insert(object));
        assert_eq!((a, b), (16, 17));
        assert_eq!(slab.remove(a), Some("a"));
        assert_eq!((slab.remove(a), slab.get(a), slab.get(0), slab.get(99)), (None, None, None, None));
        assert_eq!(slab.insert("c"), a);
        assert_eq!(slab.iter().collect::<Vec<_>>(), [(16, &"c"), (17, &"b")]);
    }
}
