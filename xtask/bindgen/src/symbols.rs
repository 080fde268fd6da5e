//! Generates the typed symbol tables.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use quote::{format_ident, quote};

use crate::bindings::libc_imports;

/// Symbols of this release and older ones are required; newer symbols are optional.
const FLOOR: u32 = 44;

struct Library {
    soname: &'static str,
    table: &'static str,
    /// Name of the generated file.
    file: &'static str,
    symbols: Vec<Symbol>,
}

struct Symbol {
    name: String,
    since: u32,
}

/// Contents of `symbols.tsv`.
pub(crate) struct Table(Vec<Library>);

impl Table {
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        let mut libraries = [
            ("libibverbs.so.1", "Verbs", "src/symbols/verbs.rs"),
            ("librdmacm.so.1", "RdmaCm", "src/symbols/rdmacm.rs"),
        ]
        .map(|(soname, table, file)| Library { soname, table, file, symbols: Vec::new() });
        let mut lines = text.lines().enumerate().filter(|(_, line)| !line.starts_with('#'));
        let heading = lines.next().map(|(_, line)| line);
        ensure!(heading == Some("library\tsymbol\tsince"), "{}: unexpected heading {heading:?}", path.display());
        for (number, line) in lines {
            let at = || format!("{}:{}: {line:?}", path.display(), number + 1);
            let [soname, name, since] = line.split('\t').collect::<Vec<_>>()[..] else {
                bail!("{}: expected three columns", at());
            };
            let library = libraries.iter_mut().find(|library| library.soname == soname).with_context(at)?;
            ensure!(library.symbols.iter().all(|symbol| symbol.name != name), "{}: listed twice", at());
            library.symbols.push(Symbol { name: name.to_owned(), since: since.parse().with_context(at)? });
        }
        Ok(Self(libraries.into()))
    }

    /// Generates a file with a struct for each library. A signature comes from the headers, or else from `newer`.
    pub(crate) fn generate(
        &self,
        functions: &BTreeMap<String, syn::Type>,
        newer: &BTreeMap<String, syn::Type>,
    ) -> Result<Vec<(&'static str, syn::File)>> {
        let listed = |name: &str| self.0.iter().flat_map(|library| &library.symbols).any(|symbol| symbol.name == name);
        // Functions that the headers declare and no library exports.
        const DECLARED_ONLY: [&str; 1] = ["ibv_wr_opcode_str"];
        for name in functions.keys() {
            ensure!(
                listed(name) || DECLARED_ONLY.contains(&name.as_str()),
                "{name} is declared in the headers but not listed in symbols.tsv"
            );
        }
        self.0.iter().map(|library| Ok((library.file, library.file(functions, newer)?))).collect()
    }
}

impl Library {
    fn file(&self, functions: &BTreeMap<String, syn::Type>, newer: &BTreeMap<String, syn::Type>) -> Result<syn::File> {
        let table = self.table(functions, newer)?;
        let libc = libc_imports(&table);
        let doc = format!(" The exported functions of `{}`, as a table of function pointers.", self.soname);
        Ok(syn::parse2(quote! {
            #![doc = #doc]
            #libc
            use crate::bindings::*;
            use crate::newer::*;
            #table
        })?)
    }

    fn table(
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
                (None, false) => bail!("{name} is in no header, and newer.rs has no {alias}"),
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
            " The functions that `{}` exports, by their C names. Functions newer than rdma-core {FLOOR} are optional.",
            self.soname
        );
        let creation = format!(
            " Created with [`{table}::from_lookup`], after which fields can be assigned. Later releases add optional \
             functions only."
        );
        Ok(quote! {
            #[doc = #doc]
            #[doc = ""]
            #[doc = #creation]
            #[derive(Clone, Copy, Debug)]
            #[allow(non_snake_case)]
            #[non_exhaustive]
            pub struct #table { #(#fields,)* }

            crate::macros::resolve!(#table, [#(#required),*], [#(#optional),*]);
        })
    }
}

/// Type aliases of a source file, by name.
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
    fn symbols_newer_than_the_floor_are_optional() {
        let rows = "libibverbs.so.1\told\t44\nlibibverbs.so.1\tnew\t45\nlibrdmacm.so.1\tnewest\t65\n";
        let files = table("floor", rows).unwrap().generate(&types(&["old", "new"]), &types(&["newest_fn"])).unwrap();
        let text: String = files.iter().map(|(_, file)| quote!(#file).to_string()).collect();
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
