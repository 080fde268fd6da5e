//! The protocol: frames, each with its length in two bytes.

/// Adds a frame.
pub(crate) fn put(into: &mut Vec<u8>, frame: &[u8]) {
    into.extend_from_slice(&(frame.len() as u16).to_be_bytes());
    into.extend_from_slice(frame);
}

/// Takes the first frame from `bytes`, if it is complete.
pub(crate) fn take<'b>(bytes: &mut &'b [u8]) -> Option<&'b [u8]> {
    let (len, rest) = bytes.split_first_chunk::<2>()?;
    let (frame, rest) = rest.split_at_checked(u16::from_be_bytes(*len).into())?;
    *bytes = rest;
    Some(frame)
}
