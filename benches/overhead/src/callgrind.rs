//! Client requests of `valgrind/callgrind.h`, which have no effect outside Valgrind.

use std::ffi::CStr;

/// Codes of `enum Vg_CallgrindClientRequest`, numbered from the tool's letters C and T.
const TOGGLE_COLLECT: usize = BASE + 2;
const DUMP_STATS_AT: usize = BASE + 3;
const BASE: usize = (b'C' as usize) << 24 | (b'T' as usize) << 16;

/// Calls `f`, and makes callgrind write a profile of it under `name`. Needs `--collect-atstart=no`.
pub(crate) fn profile<R>(name: &CStr, f: impl FnOnce() -> R) -> R {
    request([TOGGLE_COLLECT, 0, 0, 0, 0, 0]);
    let result = f();
    request([TOGGLE_COLLECT, 0, 0, 0, 0, 0]);
    request([DUMP_STATS_AT, name.as_ptr().expose_provenance(), 0, 0, 0, 0]);
    result
}

/// Makes a request. The words are its code and five arguments.
#[cfg(target_arch = "x86_64")]
fn request(words: [usize; 6]) {
    // SAFETY: the rotations cancel out, and the exchange is of a register with itself. Valgrind recognizes the sequence,
    // reads the words, and writes only `rdx`.
    unsafe {
        std::arch::asm!(
            "rol rdi, 3",
            "rol rdi, 13",
            "rol rdi, 61",
            "rol rdi, 51",
            "xchg rbx, rbx",
            in("rax") words.as_ptr(),
            inout("rdx") 0_usize => _,
        );
    }
}

/// Makes a request. The words are its code and five arguments.
#[cfg(target_arch = "aarch64")]
fn request(words: [usize; 6]) {
    // SAFETY: as on x86-64, with other registers. Valgrind writes only `x3`.
    unsafe {
        std::arch::asm!(
            "ror x12, x12, #3",
            "ror x12, x12, #13",
            "ror x12, x12, #51",
            "ror x12, x12, #61",
            "orr x10, x10, x10",
            in("x4") words.as_ptr(),
            inout("x3") 0_usize => _,
        );
    }
}

/// Not implemented for other processors. Without a profile, `cargo xtask bench overhead` reports an error.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn request(_: [usize; 6]) {}
