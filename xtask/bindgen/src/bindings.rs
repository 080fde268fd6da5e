//! Runs bindgen and rewrites its output.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use bindgen::callbacks::{DeriveTrait, ImplementsTrait, IntKind, ParseCallbacks};
use proc_macro2::{TokenStream, TokenTree};
use quote::{format_ident, quote};
use syn::visit_mut::{self, VisitMut};

/// Headers to bind: all that an application may include, except vendor headers.
pub(crate) const HEADERS: [&str; 9] = [
    "infiniband/verbs.h",
    "infiniband/verbs_api.h",
    "infiniband/ib.h",
    "infiniband/sa.h",
    "infiniband/opcode.h",
    "infiniband/tm_types.h",
    "rdma/rdma_cma.h",
    "rdma/rdma_verbs.h",
    "rdma/rsocket.h",
];

/// Kernel types that verbs_api.h renames, but that no struct in the headers uses.
const RENAMED: &str = "ib_uverbs_(access_flags|advise_mr_flag|query_port_flags|flow_action_esp_.*)";

/// System types that the libc crate provides for every target.
const FROM_LIBC: [&str; 16] = [
    "epoll_event",
    "fd_set",
    "iovec",
    "msghdr",
    "nfds_t",
    "off_t",
    "pollfd",
    "pthread_cond_t",
    "pthread_mutex_t",
    "sockaddr",
    "sockaddr_in",
    "sockaddr_in6",
    "sockaddr_storage",
    "socklen_t",
    "timespec",
    "timeval",
];

/// Internal types of glibc that those types are made of.
const INSIDE_LIBC: &str = "__(atomic|fd|pthread|off|time|suseconds|syscall|socklen)_?.*|in6?_addr.*";

/// C integer types, mainly the kernel's, with their Rust names.
const INTEGERS: [(&str, &str); 6] = [
    ("__u8", "u8"),
    ("__u16", "u16"),
    ("__u32", "u32"),
    ("__u64", "u64"),
    ("__aligned_u64", "u64"),
    ("ssize_t", "isize"),
];

/// Suffixes of enums whose values are combined with `|`.
///
/// `rdma_cm_mc_join_flags` has such a suffix but is no set of flags: its values count 0, 1, 2.
const FLAG_SUFFIXES: [&str; 9] =
    ["_flags", "_flags2", "_flag", "_mask", "_caps", "_cap_bits", "_fields", "_op_size", "_placement_type"];

pub(crate) struct Generated {
    pub(crate) file: syn::File,
    /// Function pointer type of each function that the headers declare.
    pub(crate) functions: BTreeMap<String, syn::Type>,
}

/// Prefixes of constants that C code passes as `int`.
const INTS: [&str; 9] = [
    "AF_IB",
    "PF_IB",
    "RAI_",
    "RDMA_INLINE",
    "RDMA_IOMAPSIZE",
    "RDMA_OPTION_",
    "RDMA_RO",
    "RDMA_RQSIZE",
    "RDMA_SQSIZE",
];

#[derive(Debug)]
struct Callbacks;

impl ParseCallbacks for Callbacks {
    fn int_macro(&self, name: &str, _: i64) -> Option<IntKind> {
        if name.starts_with("RDMA_IB_") {
            // 64-bit masks and port spaces. bindgen would choose smaller types for small values.
            Some(IntKind::U64)
        } else {
            (is_int(name) || name == "SOL_RDMA").then_some(IntKind::Int)
        }
    }

    fn blocklisted_type_implements_trait(&self, _: &str, derive: DeriveTrait) -> Option<ImplementsTrait> {
        matches!(derive, DeriveTrait::Copy | DeriveTrait::Debug).then_some(ImplementsTrait::Yes)
    }
}

fn is_int(name: &str) -> bool {
    INTS.iter().any(|prefix| name.starts_with(prefix))
}

pub(crate) fn generate(include: &Path) -> Result<Generated> {
    let dir = include.to_str().context("the path of the include directory is not UTF-8")?;
    let mut builder = bindgen::Builder::default()
        .header_contents("all.h", &HEADERS.map(|header| format!("#include <{header}>\n")).concat())
        .clang_args(["-I", dir])
        .rust_edition(bindgen::RustEdition::Edition2024)
        .rust_target(bindgen::RustTarget::stable(85, 0).map_err(|error| anyhow::anyhow!("Rust 1.85: {error}"))?)
        .use_core()
        .ctypes_prefix("::core::ffi")
        .default_enum_style(bindgen::EnumVariation::NewType { is_bitfield: false, is_global: true })
        // Anonymous enums become plain constants.
        .constified_enum("(IBV|IB|RDMA)_.*")
        .translate_enum_integer_types(true)
        .prepend_enum_name(false)
        .derive_debug(true)
        .derive_default(false)
        .layout_tests(true)
        .generate_comments(false)
        .generate_inline_functions(false)
        .disable_header_comment()
        .formatter(bindgen::Formatter::None)
        .parse_callbacks(Box::new(Callbacks))
        .allowlist_type(RENAMED);
    for header in HEADERS {
        builder = builder.allowlist_file(format!("{}/{}", escape(dir), escape(header)));
    }
    for name in FROM_LIBC.into_iter().chain(INTEGERS.map(|(name, _)| name)).chain(["__be16", "__be32", "__be64"]) {
        builder = builder.blocklist_type(name);
    }
    builder = builder.blocklist_type(INSIDE_LIBC);
    let source = builder.generate().context("bindgen")?.to_string();
    let mut file = syn::parse_file(&source).context("parsing bindgen's output")?;
    Names.visit_file_mut(&mut file);

    let functions = take_functions(&mut file)?;
    flatten_anonymous_enums(&mut file)?;
    let with_pthread = contains_pthread(&file);
    for item in &mut file.items {
        gate_layout(item, &with_pthread)?;
    }
    let flags = flag_operators(&file)?;
    let zeroed = zeroed(&file);
    let aliases = aliases(include, &file)?;

    let items = std::mem::take(&mut file.items);
    let libc = libc_imports(&quote!(#(#items)*));
    file = syn::parse2(quote! {
        #![doc = " Types and constants of the C headers."]
        #libc

        #[doc = " A 16-bit value in network byte order."]
        pub type __be16 = u16;
        #[doc = " A 32-bit value in network byte order."]
        pub type __be32 = u32;
        #[doc = " A 64-bit value in network byte order."]
        pub type __be64 = u64;

        #(#items)*
        #(#aliases)*
        #flags
        #zeroed
    })
    .context("parsing the finished file")?;
    Ok(Generated { file, functions })
}

/// An import of the libc types that `tokens` mention.
pub(crate) fn libc_imports(tokens: &TokenStream) -> TokenStream {
    let mut words = BTreeSet::new();
    collect_words(tokens.clone(), &mut words);
    let names = FROM_LIBC.iter().filter(|name| words.contains(**name)).map(|name| format_ident!("{name}"));
    quote!(use libc::{#(#names),*};)
}

fn collect_words(tokens: TokenStream, words: &mut BTreeSet<String>) {
    for token in tokens {
        match token {
            TokenTree::Group(group) => collect_words(group.stream(), words),
            TokenTree::Ident(ident) => _ = words.insert(ident.to_string()),
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

fn escape(text: &str) -> String {
    text.chars()
        .flat_map(|c| (!c.is_alphanumeric() && c != '/' && c != '_').then_some('\\').into_iter().chain([c]))
        .collect()
}

/// Replaces the names in [`INTEGERS`] with their Rust names.
struct Names;

impl VisitMut for Names {
    fn visit_ident_mut(&mut self, ident: &mut proc_macro2::Ident) {
        if let Some((_, rust)) = INTEGERS.iter().find(|(name, _)| ident == name) {
            *ident = format_ident!("{rust}");
        }
        visit_mut::visit_ident_mut(self, ident);
    }
}

/// Removes all `extern` blocks and returns the types of their functions.
///
/// A declared function would have to be linked.
fn take_functions(file: &mut syn::File) -> Result<BTreeMap<String, syn::Type>> {
    let mut functions = BTreeMap::new();
    for item in std::mem::take(&mut file.items) {
        let syn::Item::ForeignMod(block) = item else {
            file.items.push(item);
            continue;
        };
        for item in block.items {
            let syn::ForeignItem::Fn(function) = item else {
                bail!("an extern block contains an item that is not a function");
            };
            let signature = function.sig;
            let inputs = signature.inputs.iter();
            let output = &signature.output;
            let dots = signature.variadic.as_ref().map(|_| quote!(...));
            let ty = syn::parse2(quote!(unsafe extern "C" fn(#(#inputs,)* #dots) #output))
                .with_context(|| format!("signature of {}", signature.ident))?;
            functions.insert(signature.ident.to_string(), ty);
        }
    }
    Ok(functions)
}

/// Turns constants of anonymous enums, whose types bindgen numbers, into plain integers.
fn flatten_anonymous_enums(file: &mut syn::File) -> Result<()> {
    let mut integers = BTreeMap::new();
    file.items.retain(|item| match item {
        syn::Item::Type(alias) if alias.ident.to_string().starts_with("_bindgen_ty_") => {
            integers.insert(alias.ident.to_string(), alias.ty.clone());
            false
        }
        _ => true,
    });
    for item in &mut file.items {
        let syn::Item::Const(constant) = item else {
            continue;
        };
        let name = type_name(&constant.ty);
        if let Some(integer) = name.as_deref().and_then(|name| integers.get(name)) {
            constant.ty = if is_int(&constant.ident.to_string()) {
                syn::parse_quote!(::core::ffi::c_int)
            } else {
                integer.clone()
            };
        }
    }
    Ok(())
}

fn type_name(ty: &syn::Type) -> Option<String> {
    match ty {
        syn::Type::Path(path) => path.path.segments.last().map(|segment| segment.ident.to_string()),
        _ => None,
    }
}

/// Types that embed a mutex or a condition variable, whose sizes differ between architectures.
fn contains_pthread(file: &syn::File) -> BTreeSet<String> {
    let mut found: BTreeSet<String> = ["pthread_mutex_t", "pthread_cond_t"].map(str::to_owned).into();
    loop {
        let before = found.len();
        for item in &file.items {
            let (ident, fields) = match item {
                syn::Item::Struct(item) => (&item.ident, item.fields.iter().collect::<Vec<_>>()),
                syn::Item::Union(item) => (&item.ident, item.fields.named.iter().collect()),
                _ => continue,
            };
            // `type_name` returns `None` for pointers, so only embedded types match.
            if fields.iter().filter_map(|field| type_name(&field.ty)).any(|name| found.contains(&name)) {
                found.insert(ident.to_string());
            }
        }
        if found.len() == before {
            return found;
        }
    }
}

/// Restricts bindgen's layout assertions (`const _`) to x86-64 where the layout depends on the architecture.
fn gate_layout(item: &mut syn::Item, with_pthread: &BTreeSet<String>) -> Result<()> {
    let syn::Item::Const(constant) = item else {
        return Ok(());
    };
    if constant.ident != "_" {
        return Ok(());
    }
    let text = quote!(#constant).to_string();
    let name = text
        .split_once("size_of :: < ")
        .and_then(|(_, rest)| rest.split_once(" >"))
        .with_context(|| format!("an unnamed constant without a size assertion: {text}"))?
        .0;
    if with_pthread.contains(name) {
        constant.attrs.push(syn::parse_quote!(#[cfg(target_arch = "x86_64")]));
    }
    Ok(())
}

/// Constants of each newtype enum, with their values.
fn enums(file: &syn::File) -> Result<BTreeMap<String, Vec<(String, i64)>>> {
    let mut enums: BTreeMap<String, Vec<(String, i64)>> = BTreeMap::new();
    for item in &file.items {
        let syn::Item::Const(constant) = item else {
            continue;
        };
        let (Some(ty), syn::Expr::Call(call)) = (type_name(&constant.ty), &*constant.expr) else {
            continue;
        };
        let Some(value) = call.args.first() else {
            continue;
        };
        let value = quote!(#value).to_string().replace(' ', "");
        let value = value.parse().with_context(|| format!("the value of {}: {value}", constant.ident))?;
        enums.entry(ty).or_default().push((constant.ident.to_string(), value));
    }
    Ok(enums)
}

/// The invocation of `flags!` that implements the bit operators for all sets of flags.
fn flag_operators(file: &syn::File) -> Result<syn::Item> {
    let mut flags = Vec::new();
    for (name, values) in enums(file)? {
        if !FLAG_SUFFIXES.iter().any(|suffix| name.ends_with(suffix)) || values.iter().any(|(_, value)| *value <= 0) {
            continue;
        }
        let bits = values.iter().filter(|(_, value)| value.count_ones() == 1).fold(0, |all, (_, value)| all | value);
        for (constant, value) in &values {
            let union = value & !bits == 0 || constant.ends_with("_RANGE");
            ensure!(union, "{constant} of {name} is not a combination of the other values: is {name} a set of flags?");
        }
        flags.push(format_ident!("{name}"));
    }
    Ok(syn::parse_quote!(crate::macros::flags!(#(#flags),*);))
}

/// Items for `#define NAME OTHER`, which bindgen does not resolve if OTHER is a type or an enum value.
fn aliases(include: &Path, file: &syn::File) -> Result<Vec<syn::Item>> {
    let mut types = BTreeSet::new();
    let mut constants = BTreeMap::new();
    for item in &file.items {
        match item {
            syn::Item::Struct(item) => _ = types.insert(item.ident.to_string()),
            syn::Item::Union(item) => _ = types.insert(item.ident.to_string()),
            syn::Item::Const(item) => _ = constants.insert(item.ident.to_string(), item.ty.clone()),
            _ => {}
        }
    }
    let mut items = Vec::new();
    for header in HEADERS {
        let path = include.join(header);
        let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let ["#define", name, target] = words[..] else {
                continue;
            };
            let ident = syn::parse_str::<syn::Ident>(name);
            let (Ok(ident), Ok(target_ident)) = (ident, syn::parse_str::<syn::Ident>(target)) else {
                continue;
            };
            if types.contains(target) {
                items.push(syn::parse2(quote!(pub type #ident = #target_ident;))?);
            } else if constants.contains_key(name) {
                // The target is a literal, and bindgen has generated the constant.
            } else if name.starts_with("IBV_ACCESS_") {
                // The kernel's enum has the same bits as `ibv_access_flags`, which is the type of the other constants.
                items.push(syn::parse2(
                    quote!(pub const #ident: ibv_access_flags = ibv_access_flags(#target_ident.0);),
                )?);
            } else if let Some(ty) = constants.get(target) {
                items.push(syn::parse2(quote!(pub const #ident: #ty = #target_ident;))?);
            } else {
                ensure!(
                    !name.starts_with("ibv_") && !name.starts_with("IBV_"),
                    "{name} is an alias of {target}, which is not bound"
                );
            }
        }
    }
    Ok(items)
}

/// The invocation of `zeroed!` for all structs and unions.
///
/// All-zero bytes are valid for each: they consist of integers, raw pointers, optional functions, and arrays of those.
fn zeroed(file: &syn::File) -> syn::Item {
    let names = file.items.iter().filter_map(|item| match item {
        syn::Item::Struct(item) if is_repr_c(item) && !is_opaque(item) => Some(&item.ident),
        syn::Item::Union(item) => Some(&item.ident),
        _ => None,
    });
    syn::parse_quote!(crate::macros::zeroed!(#(#names),*);)
}

fn is_repr_c(item: &syn::ItemStruct) -> bool {
    item.attrs.iter().any(|attribute| quote!(#attribute).to_string().contains("repr (C"))
}

/// Whether the headers declare the struct without defining it.
fn is_opaque(item: &syn::ItemStruct) -> bool {
    let mut fields = item.fields.iter().filter_map(|field| field.ident.as_ref());
    fields.any(|name| name == "_address" || name == "_unused")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(source: &str) -> syn::File {
        syn::parse_file(source).unwrap()
    }

    #[test]
    fn declared_functions_become_types_without_symbols_to_link() {
        let mut file = parse(
            r#"
            pub struct item;
            unsafe extern "C" {
                pub fn one(a: u8, b: *mut item) -> i32;
                pub fn dots(a: u8, ...);
            }
            "#,
        );
        let functions = take_functions(&mut file).unwrap();
        assert_eq!(file.items.len(), 1);
        let expected: [(&str, syn::Type); 2] = [
            ("dots", syn::parse_quote!(unsafe extern "C" fn(a: u8, ...))),
            ("one", syn::parse_quote!(unsafe extern "C" fn(a: u8, b: *mut item) -> i32)),
        ];
        for ((name, ty), (expected_name, expected)) in functions.iter().zip(expected) {
            assert_eq!(name, expected_name);
            let text = quote!(#ty).to_string().replace(" ,)", ")");
            assert_eq!(text, quote!(#expected).to_string());
        }
    }

    #[test]
    fn an_embedded_mutex_counts_but_not_one_behind_a_pointer() {
        let file = parse(
            "
            pub struct direct { pub mutex: pthread_mutex_t }
            pub struct nested { pub inner: direct }
            pub struct pointer { pub inner: *mut direct }
            ",
        );
        let found = contains_pthread(&file);
        assert!(found.contains("direct") && found.contains("nested"), "{found:?}");
        assert!(!found.contains("pointer"), "{found:?}");
    }

    #[test]
    fn operators_are_generated_for_enums_of_single_bits() {
        let flags = |values: &str| {
            let item = flag_operators(&parse(values))?;
            anyhow::Ok(quote!(#item).to_string().replace(' ', ""))
        };
        let bits = "pub const A: x_flags = x_flags(1); pub const B: x_flags = x_flags(6);
                    pub const C: x_flags = x_flags(2); pub const D: x_flags = x_flags(4);";
        assert_eq!(flags(bits).unwrap(), "crate::macros::flags!(x_flags);");
        let counted = "pub const A: x_flags = x_flags(0); pub const B: x_flags = x_flags(1);";
        assert_eq!(flags(counted).unwrap(), "crate::macros::flags!();");
        let state = "pub const A: x_state = x_state(1);";
        assert_eq!(flags(state).unwrap(), "crate::macros::flags!();");
        let neither = "pub const A: x_flags = x_flags(1); pub const B: x_flags = x_flags(5);";
        assert!(flags(neither).is_err());
    }
}
