//! `cargo xtask arrows`: the modules of a crate form no cycle, and crates depend on each other as
//! ARCHITECTURE.md says.
//!
//! A folder together with its own files counts as one module, at each level of the tree; see
//! [`mod@cycles`]. The sources are read as text, with these limits. A method that is called on a
//! value does not count, and neither does a macro that is in scope without a path. Code in every
//! `cfg` counts except tests. An item that a macro defines belongs to the module where its path
//! ends.

mod crates;
mod cycles;
mod tree;

use cycles::{Cycle, Node, cycles};
use tree::Tree;

use crate::run::{Result, root};

/// Uses shown for each arrow of a cycle.
const SHOWN_USES: usize = 3;

/// Runs the task; words choose crates, `--summary` leaves out the uses.
pub(crate) fn check(words: &[&str]) -> Result {
    let brief = words.contains(&"--summary");
    let chosen: Vec<&str> = words.iter().copied().filter(|word| *word != "--summary").collect();
    let packages = crates::packages()?;
    if let Some(word) = chosen.iter().find(|word| packages.iter().all(|package| package.name != **word)) {
        return Err(format!("no such crate: `{word}`"));
    }
    let mut count = 0;
    for package in packages.iter().filter(|p| chosen.is_empty() || chosen.contains(&p.name.as_str())) {
        for target in &package.roots {
            let mut tree = Tree::read(&root().join(target))?;
            tree.relative_to(&root());
            for cycle in cycles(&tree) {
                count += 1;
                show(&package.name, &target.to_string_lossy(), &tree, &cycle, brief);
            }
        }
    }
    let differences = if chosen.is_empty() { crates::differences(&packages)? } else { Vec::new() };
    for difference in &differences {
        println!("{difference}");
    }
    if count + differences.len() == 0 {
        println!("arrows: 0 cycles, 0 dependencies that ARCHITECTURE.md does not name");
        return Ok(());
    }
    Err(format!("{count} cycles between modules, {} differences from ARCHITECTURE.md", differences.len()))
}

fn show(package: &str, target: &str, tree: &Tree, cycle: &Cycle, brief: bool) {
    let names: Vec<&str> = cycle.nodes.iter().map(|node| node.name(tree)).collect();
    let level = tree.path_of(cycle.parent);
    let of = tree.modules[cycle.parent].children.len();
    let children = cycle.nodes.iter().filter(|node| **node != Node::Own).count();
    println!("{package} ({target}), {level}: {children} of {of} modules: {}", names.join(", "));
    if brief {
        return;
    }
    for (from, to, uses) in &cycle.arrows {
        println!("  {} -> {} ({})", from.name(tree), to.name(tree), uses.len());
        for each in uses.iter().take(SHOWN_USES) {
            println!("      {each}");
        }
    }
}
