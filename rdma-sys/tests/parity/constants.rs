//! Compares constants and type layouts in the generated file with the values that the C compiler computes.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_longlong};
use std::fmt::Write as _;
use std::path::Path;

use crate::c;

const BINDINGS: &str = include_str!("../../src/bindings.rs");

const INCLUDES: &str = "\
#include <stddef.h>
#include <infiniband/verbs.h>
#include <infiniband/ib.h>
#include <infiniband/sa.h>
#include <infiniband/opcode.h>
#include <infiniband/tm_types.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <rdma/rsocket.h>
";

/// Evaluates C expressions with the C compiler.
pub fn evaluate(name: &str, include: &Path, expressions: &[String]) -> Vec<i64> {
    let mut source = format!("{INCLUDES}\nconst struct {{ const char *text; long long value; }} values[] = {{\n");
    for expression in expressions {
        writeln!(source, "\t{{ \"{expression}\", (long long)({expression}) }},").unwrap();
    }
    source.push_str("};\n");
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}.c", std::process::id()));
    std::fs::write(&path, source).unwrap();
    let library = c::compile(name, &path, include, &[]);
    std::fs::remove_file(path).unwrap();

    #[repr(C)]
    struct Value {
        text: *const c_char,
        value: c_longlong,
    }
    let values = unsafe { library.get::<*const Value>(b"values\0") }.unwrap().as_raw_ptr().cast::<Value>();
    expressions
        .iter()
        .enumerate()
        .map(|(i, expression)| unsafe {
            let value = values.add(i).read();
            assert_eq!(CStr::from_ptr(value.text).to_str().unwrap(), expression);
            value.value
        })
        .collect()
}

/// The constants of a generated file by name.
fn constants(file: &str) -> BTreeMap<&str, i64> {
    let mut texts = BTreeMap::new();
    for (at, keyword) in file.match_indices("\npub const ") {
        let (declaration, _) = file[at + keyword.len()..].split_once(';').unwrap();
        let (name, value) = declaration.split_once(':').unwrap();
        texts.insert(name, value.split_once('=').unwrap().1.trim());
    }
    texts.keys().map(|name| (*name, value(&texts, name))).collect()
}

/// A number, `newtype(number)`, the name of another constant, or `newtype(name.0)`.
fn value(texts: &BTreeMap<&str, &str>, name: &str) -> i64 {
    let text = texts[name];
    let inner = text.split_once('(').map_or(text, |(_, inner)| inner.trim_end_matches(')'));
    let inner = inner.trim_end_matches(".0").trim();
    match inner.parse::<i128>() {
        Ok(number) => number as i64,
        Err(_) => value(texts, inner),
    }
}

#[test]
fn constants_have_the_values_of_c() {
    let Some(include) = c::include() else { return };
    let constants = constants(BINDINGS);
    assert!(constants.len() > 600, "{} constants", constants.len());
    let names: Vec<String> = constants.keys().map(|name| (*name).to_owned()).collect();
    for ((name, rust), c) in constants.iter().zip(evaluate("constants", &include, &names)) {
        assert_eq!(*rust, c, "{name}");
    }
    println!("{} constants alike", constants.len());
}

#[test]
fn hand_written_constants_have_the_values_of_c() {
    let Some(include) = c::include() else { return };
    let expressions = ["__VERBS_ABI_IS_EXTENDED", "IBV_ALLOCATOR_USE_DEFAULT"];
    let c = evaluate("hand-written", &include, &expressions.map(|name| format!("(uintptr_t){name}")));
    let rust = [rdma_sys::__VERBS_ABI_IS_EXTENDED, rdma_sys::IBV_ALLOCATOR_USE_DEFAULT];
    assert_eq!(c, rust.map(|pointer| pointer.addr() as i64));
}

/// The generated file has the numbers of x86-64. The Rust compiler has checked them against the Rust types.
#[cfg(target_arch = "x86_64")]
#[test]
fn types_have_the_layout_of_c() {
    let Some(include) = c::include() else { return };
    // One line per assertion.
    let file: String = BINDINGS.split_whitespace().collect::<Vec<_>>().join(" ");
    let unions: std::collections::BTreeSet<&str> = file
        .match_indices("pub union ")
        .filter_map(|(at, keyword)| file[at + keyword.len()..].split(' ').next())
        .collect();
    let in_c = |name: &str| format!("{} {name}", if unions.contains(name) { "union" } else { "struct" });

    let mut expressions = Vec::new();
    let mut rust = Vec::new();
    for (at, _) in file.match_indices("[\"") {
        let (what, rest) = file[at + 2..].split_once('"').unwrap();
        let (_, number) = rest.split_once(" - ").unwrap();
        let number: i64 = number.split_once("usize").unwrap().0.parse().unwrap();
        // These types and fields have no name in C.
        if what.contains("__bindgen") {
            continue;
        }
        let expression = if let Some(name) = what.strip_prefix("Size of ") {
            format!("sizeof({})", in_c(name))
        } else if let Some(name) = what.strip_prefix("Alignment of ") {
            format!("_Alignof({})", in_c(name))
        } else {
            let (name, field) = what.strip_prefix("Offset of field: ").unwrap().split_once("::").unwrap();
            // bindgen appends an underscore to Rust keywords.
            let field = field.trim_end_matches('_');
            format!("offsetof({}, {field})", in_c(name))
        };
        expressions.push(expression);
        rust.push(number);
    }
    for (at, keyword) in
        file.match_indices("#[repr(transparent)] #[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)] pub struct ")
    {
        let name = file[at + keyword.len()..].split('(').next().unwrap();
        expressions.push(format!("sizeof(enum {name})"));
        rust.push(size_of::<u32>() as i64);
    }
    assert!(expressions.len() > 1000, "{} layout facts", expressions.len());
    let c = evaluate("layouts", &include, &expressions);
    for ((expression, rust), c) in expressions.iter().zip(rust).zip(c) {
        assert_eq!(rust, c, "{expression}");
    }
    println!("{} sizes, alignments and offsets alike", expressions.len());
}
