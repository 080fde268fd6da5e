//! The service without its transport: 64-byte values, 90 % reads.

use std::collections::HashMap;
use std::sync::Mutex;

/// Bytes of a request: the operation, the key, and the value of a write.
pub(crate) const REQUEST: usize = 1 + 8 + VALUE;
pub(crate) const VALUE: usize = 64;
const KEYS: u64 = 10_000;

#[derive(Default)]
pub(crate) struct Store(Mutex<HashMap<u64, [u8; VALUE]>>);

impl Store {
    /// Answers a request. Reads have no value, so they are shorter.
    pub(crate) fn answer(&self, request: &[u8]) -> [u8; VALUE] {
        let Some((operation, rest)) = request.split_first() else { return [0; VALUE] };
        let Some((key, value)) = rest.split_first_chunk() else { return [0; VALUE] };
        let key = u64::from_be_bytes(*key);
        let mut store = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match (operation, value.first_chunk()) {
            (1, Some(value)) => {
                store.insert(key, *value);
                *value
            }
            _ => store.get(&key).copied().unwrap_or([0; VALUE]),
        }
    }
}

/// Requests in random order, by a generator with this seed.
pub(crate) struct Requests(pub(crate) u64);

impl Requests {
    /// The next request, and its length.
    pub(crate) fn next(&mut self) -> ([u8; REQUEST], usize) {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let random = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d);
        let mut request = [0x5a; REQUEST];
        let is_write = random % 10 == 0;
        request[0] = u8::from(is_write);
        request[1..9].copy_from_slice(&((random >> 8) % KEYS).to_be_bytes());
        (request, if is_write { REQUEST } else { 9 })
    }
}
