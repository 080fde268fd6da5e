//! Requests to callgrind, as `valgrind/callgrind.h` makes them: instructions that do nothing where no Valgrind runs.

use std::ffi::CStr;

/// Codes of `enum Vg_CallgrindClientRequest`; the tool's are numbered from its letters, C and T.
const TOGGLE_COLLECT: usize = BASE + 2;
const DUMP_STATS_AT: usize = BASE + 3;
const BASE: usize = (b'C' as usize) << 24 | (b'T' as usize) << 16;

/// Counts what `f` does, with `--collect-atstart=no`, and has it written to a profile that says `name`.
pub(crate) fn profile<R>(name: &CStr, f: impl FnOnce() -> R) -> R {
    request([TOGGLE_COLLECT, 0, 0, 0, 0, 0]);
    let result = f();
    request([TOGGLE_COLLECT, 0, 0, 0, 0, 0]);
    request([DUMP_STATS_AT, name.as_ptr().expose_provenance(), 0, 0, 0, 0]);
    result
}

/// A code and its five arguments.
#[cfg(target_arch = "x86_64")]
fn request(words: [usize; 6]) {
    // SAFETY: the rotations add up to nothing and the exchange is of a register with itself; under Valgrind, which knows
    // the sequence, the words are read and `rdx` is the answer.
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

/// A code and its five arguments.
#[cfg(target_arch = "aarch64")]
fn request(words: [usize; 6]) {
    // SAFETY: as on x86-64, of other registers; `x3` is the answer.
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

/// Valgrind has other sequences for other processors: there no profile is written, and whoever waits for it says so.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn request(_: [usize; 6]) {}
