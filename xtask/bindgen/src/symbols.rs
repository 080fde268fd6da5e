//! The typed symbol tables.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use quote::{format_ident, quote};

use crate::bindings::libc_imports;

/// The newest release whose symbols a library must have.
const FLOOR: u32 = 44;

struct Library {
    soname: &'static str,
    table: &'static str,
    symbols: Vec<Symbol>,
}

struct Symbol {
    name: String,
    since: u32,
}

/// `symbols.tsv`, read.
pub(crate) struct Table(Vec<Library>);

impl Table {
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        let mut libraries = [("libibverbs.so.1", "Verbs"), ("librdmacm.so.1", "RdmaCm")]
            .map(|(soname, table)| Library { soname, table, symbols: Vec::new() });
        let mut lines = text.lines().enumerate().filter(|(_, line)| !line.starts_with('#'));
        let heading = lines.next().map(|(_, line)| line);
        ensure!(heading == Some("library\tsymbol\tsince"), "{}: heading is {heading:?}", path.display());
        for (number, line) in lines {
            let at = || format!("{}:{}: {line:?}", path.display(), number + 1);
            let [soname, name, since] = line.split('\t').collect::<Vec<_>>()[..] else {
                bail!("{}: want three columns", at());
            };
            let library = libraries.iter_mut().find(|library| library.soname == soname).with_context(at)?;
            ensure!(library.symbols.iter().all(|symbol| symbol.name != name), "{}: listed twice", at());
            library.symbols.push(Symbol { name: name.to_owned(), since: since.parse().with_context(at)? });
        }
        Ok(Self(libraries.into()))
    }

    /// One struct per library. A signature comes from the headers, else from `newer`.
    pub(crate) fn generate(
        &self,
        functions: &BTreeMap<String, syn::Type>,
        newer: &BTreeMap<String, syn::Type>,
    ) -> Result<syn::File> {
        let listed = |name: &str| self.0.iter().flat_map(|library| &library.symbols).any(|symbol| symbol.name == name);
        // Headers declare more than libraries export; each such name needs a reason.
        const DECLARED_ONLY: [&str; 1] = ["ibv_wr_opcode_str"];
        for name in functions.keys() {
            ensure!(
                listed(name) || DECLARED_ONLY.contains(&name.as_str()),
                "{name} is declared in the headers and not in symbols.tsv"
            );
        }
        let tables = self.0.iter().map(|library| library.generate(functions, newer)).collect::<Result<Vec<_>>>()?;
        let libc = libc_imports(&quote!(#(#tables)*));
        Ok(syn::parse2(quote! {
            #![doc = " The exported functions of both libraries, as tables of function pointers."]
            #libc
            use crate::bindings::*;
            use crate::newer::*;
            #(#tables)*
        })?)
    }
}

impl Library {
    fn generate(
        &self,
        functions: &BTreeMap<String, syn::Type>,
        newer: &BTreeMap<String, syn::Type>,
    ) -> Result<proc_macro2::TokenStream> {
        let table = format_ident!("{}", self.table);
        let mut fields = Vec::new();
        let mut required = Vec::new();
        let mut optional = Vec::new();
        for Symbol { name, since } in &self.symbols {
            let field = format_ident!("{name}");
            let alias = format_ident!("{name}_fn");
            let ty = match (functions.get(name), newer.contains_key(&format!("{name}_fn"))) {
                (Some(ty), false) => quote!(#ty),
                (None, true) => quote!(#alias),
                (Some(_), true) => {
                    bail!("{name} is in the headers now: remove {alias} from newer.rs")
                }
                (None, false) => bail!("{name} is in no header and newer.rs has no {alias}"),
            };
            if *since <= FLOOR {
                let doc = format!(" `{name}`");
                fields.push(quote!(#[doc = #doc] pub #field: #ty));
                required.push(quote!((#field, #since)));
            } else {
                let doc = format!(" `{name}`, since rdma-core {since}");
                fields.push(quote!(#[doc = #doc] pub #field: Option<#ty>));
                optional.push(quote!(#field));
            }
        }
        let doc = format!(
            " The functions that `{}` exports, by their C names. Those newer than rdma-core {FLOOR} are optional.",
            self.soname
        );
        Ok(quote! {
            #[doc = #doc]
            #[derive(Clone, Copy, Debug)]
            #[allow(non_snake_case)]
            pub struct #table { #(#fields,)* }

            crate::macros::resolve!(#table, [#(#required),*], [#(#optional),*]);
        })
    }
}

/// The type aliases of a source file, by name.
pub(crate) fn function_types(path: &Path) -> Result<BTreeMap<String, syn::Type>> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let file = syn::parse_file(&text).with_context(|| format!("parsing {}", path.display()))?;
    Ok(file
        .items
        .into_iter()
        .filter_map(|item| match item {
            syn::Item::Type(alias) => Some((alias.ident.to_string(), *alias.ty)),
            _ => None,
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(name: &str, rows: &str) -> Result<Table> {
        let path = std::env::temp_dir().join(format!("{name}-{}.tsv", std::process::id()));
        fs::write(&path, format!("# comment\nlibrary\tsymbol\tsince\n{rows}"))?;
        let table = Table::read(&path);
        fs::remove_file(path)?;
        table
    }

    fn types(names: &[&str]) -> BTreeMap<String, syn::Type> {
        names.iter().map(|name| ((*name).to_owned(), syn::parse_quote!(unsafe extern "C" fn()))).collect()
    }

    #[test]
    fn symbols_after_the_floor_are_optional() {
        let rows = "libibverbs.so.1\told\t44\nlibibverbs.so.1\tnew\t45\nlibrdmacm.so.1\tnewest\t65\n";
        let file = table("floor", rows).unwrap().generate(&types(&["old", "new"]), &types(&["newest_fn"])).unwrap();
        let text = quote!(#file).to_string();
        assert!(text.contains(r#"pub old : unsafe extern "C" fn ()"#), "{text}");
        assert!(text.contains(r#"pub new : Option < unsafe extern "C" fn () >"#), "{text}");
        assert!(text.contains("pub newest : Option < newest_fn >"), "{text}");
    }

    #[test]
    fn the_list_and_the_headers_must_agree() {
        let rows = "libibverbs.so.1\tlisted\t13\n";
        let refused = |functions: &[&str], newer: &[&str]| {
            let refused = table("agree", rows).unwrap().generate(&types(functions), &types(newer));
            refused.err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert_eq!(refused(&["listed"], &[]), "");
        assert!(refused(&[], &[]).contains("in no header"));
        assert!(refused(&["listed", "another"], &[]).contains("another is declared"));
        assert!(refused(&["listed"], &["listed_fn"]).contains("in the headers now"));
    }

    #[test]
    fn a_bad_row_is_refused() {
        for row in ["libibverbs.so.1\tx", "libother.so.1\tx\t13", "libibverbs.so.1\tx\tsoon"] {
            assert!(table("bad", &format!("{row}\n")).is_err(), "{row}");
        }
        assert!(table("twice", &"libibverbs.so.1\tx\t13\n".repeat(2)).is_err());
    }
}
