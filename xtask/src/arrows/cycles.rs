//! Cycles among the children of one module.
//!
//! At each level of the tree the nodes are the children of a module, each with all that lies below
//! it, and the module's own file. A path in the code of one node that leads to an item of another
//! is an arrow. The own file is a node like its children: a child that uses an item defined in
//! `mod.rs` has an arrow to it, and `mod.rs` has an arrow to each child it uses. A declaration
//! (`mod child;`) and a re-export (`pub use child::Item`) are no arrows, and a path through a
//! re-export leads to the module that defines the item.

use std::collections::BTreeMap;

use super::tree::{Id, Reference, Tree};

/// Nodes of one level that reach each other.
pub(super) struct Cycle {
    /// The module whose children they are.
    pub(super) parent: Id,
    pub(super) nodes: Vec<Node>,
    /// Arrows among them, each with the uses behind it.
    pub(super) arrows: Vec<(Node, Node, Vec<String>)>,
}

/// A child of a module, or the module's own file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Node {
    Own,
    Child(Id),
}

impl Node {
    pub(super) fn name(self, tree: &Tree) -> &str {
        match self {
            Self::Own => "(own file)",
            Self::Child(id) => &tree.modules[id].name,
        }
    }
}

type Arrows = BTreeMap<(Node, Node), Vec<String>>;

/// Finds all cycles, level by level from the root.
pub(super) fn cycles(tree: &Tree) -> Vec<Cycle> {
    let mut levels = BTreeMap::<Id, Arrows>::new();
    for (from, module) in tree.modules.iter().enumerate() {
        for reference in &module.references {
            let Some(to) = tree.resolve(from, &reference.path) else { continue };
            let Some((level, source, target)) = arrow(tree, from, to) else { continue };
            // A facade shows what its children define.
            if reference.is_reexport && source == Node::Own {
                continue;
            }
            levels.entry(level).or_default().entry((source, target)).or_default().push(shown(reference));
        }
    }
    levels.into_iter().flat_map(|(parent, arrows)| components(parent, &arrows)).collect()
}

fn shown(reference: &Reference) -> String {
    format!("{}:{} {}", reference.file.display(), reference.line, reference.path.join("::"))
}

/// Returns the level at which a use shows, and its two nodes there.
fn arrow(tree: &Tree, from: Id, to: Id) -> Option<(Id, Node, Node)> {
    let (from, to) = (ancestors(tree, from), ancestors(tree, to));
    let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let node = |line: &[Id]| line.get(common).map_or(Node::Own, |id| Node::Child(*id));
    let (source, target) = (node(&from), node(&to));
    (source != target).then(|| (from[common - 1], source, target))
}

/// The modules from the root to `id`.
fn ancestors(tree: &Tree, mut id: Id) -> Vec<Id> {
    let mut line = vec![id];
    while let Some(parent) = tree.modules[id].parent {
        line.push(parent);
        id = parent;
    }
    line.reverse();
    line
}

/// Groups the nodes of one level that reach each other.
fn components(parent: Id, arrows: &Arrows) -> Vec<Cycle> {
    let mut nodes: Vec<Node> = arrows.keys().flat_map(|(a, b)| [*a, *b]).collect();
    nodes.sort_unstable();
    nodes.dedup();
    let count = nodes.len();
    let mut reaches = vec![vec![false; count]; count];
    let index = |node: &Node| nodes.binary_search(node).unwrap_or_default();
    for (a, b) in arrows.keys() {
        reaches[index(a)][index(b)] = true;
    }
    for via in 0..count {
        for a in 0..count {
            if reaches[a][via] {
                let further = reaches[via].clone();
                reaches[a].iter_mut().zip(further).for_each(|(reached, more)| *reached |= more);
            }
        }
    }
    let mut found: Vec<Cycle> = Vec::new();
    for (a, node) in nodes.iter().enumerate() {
        if found.iter().any(|cycle| cycle.nodes.contains(node)) {
            continue;
        }
        let with = |b: usize| reaches[a][b] && reaches[b][a];
        let members: Vec<Node> = (0..count).filter(|b| with(*b)).map(|b| nodes[b]).collect();
        if members.len() > 1 {
            let inside = |(a, b): &(Node, Node)| members.contains(a) && members.contains(b);
            let arrows = arrows.iter().filter(|(ends, _)| inside(ends));
            let arrows = arrows.map(|((a, b), uses)| (*a, *b, uses.clone())).collect();
            found.push(Cycle { parent, nodes: members, arrows });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// Writes a crate, and returns its cycles as names of nodes.
    fn cycles_of(name: &str, files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let folder = std::env::temp_dir().join(format!("xtask-arrows-{}-{name}", std::process::id()));
        for (file, text) in files {
            let path: PathBuf = folder.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let tree = Tree::read(&folder.join("lib.rs")).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        let names = |cycle: &Cycle| cycle.nodes.iter().map(|n| n.name(&tree).to_owned()).collect();
        cycles(&tree).iter().map(names).collect()
    }

    #[test]
    fn siblings_that_use_each_other_are_a_cycle() {
        let files = [
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a.rs", "use crate::b::B; pub struct A;"),
            ("b.rs", "pub struct B; fn f() -> super::c::C { todo!() }"),
            ("c/mod.rs", "mod d; pub struct C;"),
            ("c/d.rs", "use crate::{a::{self, A}, b};"),
        ];
        assert_eq!(cycles_of("siblings", &files), [["a", "b", "c"]]);
    }

    #[test]
    fn a_facade_is_no_cycle_and_an_own_item_that_is_used_both_ways_is() {
        let facade = [
            ("lib.rs", "mod a; mod b; pub use a::A; pub(crate) use b::*;"),
            ("a.rs", "use crate::B; pub struct A;"),
            ("b.rs", "pub struct B; #[cfg(test)] mod tests { use crate::A; }"),
        ];
        assert!(cycles_of("facade", &facade).is_empty());
        let both =
            [("lib.rs", "mod a; use a::A; pub struct Own(A);"), ("a.rs", "pub struct A; impl super::Own {}")];
        assert_eq!(cycles_of("own", &both), [["(own file)", "a"]]);
    }

    #[test]
    fn what_comes_from_other_crates_or_comments_is_no_arrow() {
        let files = [
            ("lib.rs", "mod a; mod b; use std::fmt;"),
            ("a.rs", "use bytes::b; use super::fmt; /* crate::b::B */ const S: &str = \"crate::b::B\";"),
            ("b.rs", "use crate::a::{S as T}; fn f(x: u8) { x.a::<u8>(); other::a::f(); }"),
        ];
        assert!(cycles_of("foreign", &files).is_empty());
    }

    #[test]
    fn a_macro_leads_to_the_module_that_defines_it() {
        let files = [
            ("lib.rs", "#[macro_use] mod a; mod b;"),
            ("a.rs", "#[macro_export] macro_rules! m { () => { $crate::b::f() } }"),
            ("b.rs", "pub fn f() { crate::m!() }"),
        ];
        assert_eq!(cycles_of("macro", &files), [["a", "b"]]);
    }
}
