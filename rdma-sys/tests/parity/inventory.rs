//! Checks that every inline function has a case.

use std::collections::BTreeSet;
use std::path::Path;

use crate::c;

const HEADERS: [&str; 4] = ["infiniband/verbs.h", "rdma/rdma_verbs.h", "rdma/rdma_cma.h", "infiniband/ib.h"];

/// For programs that link their providers statically, which Rust programs with this crate cannot do.
const LEFT_OUT: [&str; 1] = ["__ibv_get_device_list"];

/// Macros that callers use instead of the inline function of the same purpose.
const MACROS: [&str; 3] = ["ibv_query_port", "ibv_reg_mr", "ibv_reg_mr_iova"];

/// The names of the `static inline` functions in a header.
fn inlines(header: &str) -> BTreeSet<String> {
    let text = without_comments(header);
    let mut names = BTreeSet::new();
    for (at, keyword) in text.match_indices("static inline") {
        let declaration = &text[at + keyword.len()..];
        let before = declaration.split('(').next().unwrap_or_default();
        let name = before.rsplit(|c: char| !c.is_alphanumeric() && c != '_').find(|word| !word.is_empty());
        assert!(names.insert(name.expect("a function has a name").to_owned()), "{name:?} twice");
    }
    names
}

fn without_comments(text: &str) -> String {
    let mut rest = text;
    let mut kept = String::new();
    while let Some((before, comment)) = rest.split_once("/*") {
        kept.push_str(before);
        rest = comment.split_once("*/").map_or("", |(_, after)| after);
    }
    kept + rest
}

/// The `static inline` functions of all headers below `include`.
pub fn all(include: &Path) -> BTreeSet<String> {
    HEADERS
        .into_iter()
        .flat_map(|header| {
            let path = include.join(header);
            let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            let found = inlines(&text);
            assert!(!found.is_empty(), "{header} has no inlines");
            found
        })
        .collect()
}

#[test]
fn every_static_inline_is_compared() {
    let Some(include) = c::include() else { return };
    let mut expected = all(&include);
    for name in LEFT_OUT {
        assert!(expected.remove(name), "{name} does not exist");
    }
    expected.extend(MACROS.map(str::to_owned));

    let mut compared = BTreeSet::new();
    for case in crate::topics().into_iter().flat_map(|(_, cases)| cases) {
        assert!(compared.insert(case.name.to_owned()), "{} is compared twice", case.name);
    }
    let none: [&String; 0] = [];
    assert_eq!(expected.difference(&compared).collect::<Vec<_>>(), none, "in the headers, not compared");
    assert_eq!(compared.difference(&expected).collect::<Vec<_>>(), none, "compared, not in the headers");
}

#[test]
fn the_scan_finds_every_form_of_an_inline() {
    let header = "
        /* static inline int commented_out(void) */
        static inline int one_line(int a) { return a; }
        static inline struct x *
        name_on_the_next_line(struct y *(*callback)(void))
        __attribute__((__always_inline__)) static inline struct x *
        __with_attribute(unsigned int access)
        static inline
        int ibv_type_below(void)
    ";
    let names: Vec<String> = inlines(header).into_iter().collect();
    assert_eq!(names, ["__with_attribute", "ibv_type_below", "name_on_the_next_line", "one_line"]);
}
