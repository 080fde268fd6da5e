//! Checks the module graph: neither files nor folders of this crate use each other in a cycle.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

type Module = Vec<String>;
type Graph = BTreeMap<Module, BTreeSet<Module>>;

/// Reads the modules below `directory`, without comments and tests.
fn read(directory: &Path, parent: &[String], modules: &mut BTreeMap<Module, String>) {
    for path in fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()) {
        let stem = path.file_stem().unwrap().to_str().unwrap();
        let module = if ["main", "mod"].contains(&stem) { parent.to_vec() } else { [parent, &[stem.into()]].concat() };
        if path.is_dir() && stem != "testing" {
            read(&path, &module, modules);
        } else if path.is_file() && stem != "tests" {
            let text = fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]\nmod tests").next().unwrap().lines();
            modules.insert(module, code.map(|line| line.split("//").next().unwrap()).collect::<Vec<_>>().join("\n"));
        }
    }
}

/// The module of this crate that `path` names in the module `here`.
fn resolve(path: &str, here: &Module, modules: &BTreeMap<Module, String>) -> Option<Module> {
    let (mut module, mut is_path) = (here.clone(), false);
    for name in path.split("::").map(str::trim) {
        match name {
            "crate" => module.clear(),
            "super" => _ = module.pop(),
            "self" => {}
            name if modules.contains_key(&[module.as_slice(), &[name.into()]].concat()) => module.push(name.into()),
            _ => break,
        }
        is_path = true;
    }
    is_path.then_some(module)
}

/// The modules that the code of `here` names, in imports or elsewhere.
fn uses(here: &Module, modules: &BTreeMap<Module, String>) -> BTreeSet<Module> {
    let mut paths = Vec::new();
    for statement in modules[here].replace(" as ", " , ").split(';') {
        let import = statement.trim_start_matches('\n').trim_start_matches("pub(crate) ").strip_prefix("use ");
        match import.map(|tree| tree.split_once('{').unwrap_or(("", tree))) {
            Some((parent, list)) => {
                assert!(!list.contains('{'), "a list within a list is not understood: {statement}");
                paths.extend(list.replace('}', "").split(',').map(|name| format!("{parent}{}", name.trim())));
            }
            None => {
                let words = statement.split(|c: char| !c.is_alphanumeric() && !['_', ':'].contains(&c));
                paths.extend(words.filter(|word| word.contains("::")).map(str::to_owned));
            }
        }
    }
    paths.iter().filter_map(|path| resolve(path, here, modules)).collect()
}

#[test]
fn modules_have_no_cycles() {
    let mut modules = BTreeMap::new();
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &[], &mut modules);
    for (what, depth) in [("folders", 1), ("files", usize::MAX)] {
        let cut = |module: &Module| module.iter().take(depth).cloned().collect::<Module>();
        let mut graph = Graph::new();
        for module in modules.keys() {
            let used = uses(module, &modules).iter().map(cut).filter(|used| *used != cut(module)).collect::<Vec<_>>();
            graph.entry(cut(module)).or_default().extend(used);
        }
        assert!(graph.len() > 10 && graph.values().flatten().count() > 30, "too little was found: {graph:?}");
        // A module that uses no other, or is used by no other, is in no cycle.
        let mut count = usize::MAX;
        while graph.len() < count {
            count = graph.len();
            let used: BTreeSet<Module> = graph.values().flatten().cloned().collect();
            let left: BTreeSet<Module> = graph.keys().cloned().collect();
            graph.values_mut().for_each(|uses| uses.retain(|module| left.contains(module)));
            graph.retain(|module, uses| !uses.is_empty() && used.contains(module));
        }
        assert!(graph.is_empty(), "{what} that use each other: {graph:?}");
    }
}
