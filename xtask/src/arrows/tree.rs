//! The module tree of one crate target, read from its sources.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use crate::run::Result;
use crate::source::{Kind, Token, balanced, test_code, tokens};

/// Index of a [`Module`] in its [`Tree`].
pub(super) type Id = usize;

/// All modules of one crate target; the first is the root.
#[derive(Default)]
pub(super) struct Tree {
    pub(super) modules: Vec<Module>,
    /// Modules that define the macros exported to the root.
    exported_macros: HashMap<String, Id>,
}

/// Module, with or without a file of its own.
pub(super) struct Module {
    pub(super) name: String,
    pub(super) parent: Option<Id>,
    pub(super) children: BTreeMap<String, Id>,
    pub(super) references: Vec<Reference>,
    items: HashSet<String>,
    imports: HashMap<String, Vec<String>>,
    globs: Vec<Vec<String>>,
}

/// A path in the code of a module.
pub(super) struct Reference {
    pub(super) path: Vec<String>,
    pub(super) file: PathBuf,
    pub(super) line: usize,
    /// `pub use`, with any restriction of its visibility.
    pub(super) is_reexport: bool,
}

/// Target of a path.
#[derive(Clone, Copy)]
enum Target {
    Module(Id),
    /// An item that this module defines.
    Item(Id),
}

impl Tree {
    /// Reads the sources of the target whose root is the file `root`.
    pub(super) fn read(root: &Path) -> Result<Self> {
        let mut tree = Self::default();
        tree.add("crate", None);
        tree.file(0, root, root.parent().unwrap_or(root))?;
        Ok(tree)
    }

    fn add(&mut self, name: &str, parent: Option<Id>) -> Id {
        let id = self.modules.len();
        self.modules.push(Module {
            name: name.to_owned(),
            parent,
            children: BTreeMap::new(),
            references: Vec::new(),
            items: HashSet::new(),
            imports: HashMap::new(),
            globs: Vec::new(),
        });
        id
    }

    /// Reads one file; `folder` is where the files of its children lie.
    fn file(&mut self, module: Id, file: &Path, folder: &Path) -> Result {
        let text =
            std::fs::read_to_string(file).map_err(|e| format!("cannot read {}: {e}", file.display()))?;
        let all = tokens(&text);
        let tests = test_code(&all);
        let is_code = |(at, token): (usize, &Token<'_>)| {
            let comment = matches!(token.kind, Kind::Comment | Kind::Documentation);
            !comment && !tests.iter().any(|range| range.contains(&at))
        };
        let code: Vec<Token<'_>> =
            all.iter().enumerate().filter(|entry| is_code((entry.0, entry.1))).map(|(_, t)| *t).collect();
        self.code(module, &code, file, folder)
    }

    fn code(&mut self, module: Id, code: &[Token<'_>], file: &Path, folder: &Path) -> Result {
        let text = |at: usize| code.get(at).map_or("", |token| token.text);
        let (mut at, mut depth) = (0, 0);
        let (mut visible, mut path_attribute, mut exported) = (false, None, false);
        while at < code.len() {
            match text(at) {
                "#" if text(at + 1) == "[" || (text(at + 1) == "!" && text(at + 2) == "[") => {
                    let open = if text(at + 1) == "[" { at + 1 } else { at + 2 };
                    if text(open + 1) == "path" {
                        path_attribute = Some(text(open + 3).trim_matches('"').to_owned());
                    }
                    exported |= text(open + 1) == "macro_export";
                    at = open + balanced(&code[open..]) + 1;
                    continue;
                }
                "pub" => {
                    visible = true;
                    at += 1;
                    at += if text(at) == "(" { balanced(&code[at..]) + 1 } else { 0 };
                    continue;
                }
                "mod" if depth == 0 && code[at].kind == Kind::Word => {
                    let name = text(at + 1).to_owned();
                    let child = match self.modules[module].children.get(&name) {
                        // The other form of a module that a feature chooses.
                        Some(child) => *child,
                        None => {
                            let child = self.add(&name, Some(module));
                            self.modules[module].children.insert(name.clone(), child);
                            child
                        }
                    };
                    if text(at + 2) == "{" {
                        let length = balanced(&code[at + 2..]);
                        let inner = &code[at + 3..at + 2 + length];
                        self.code(child, inner, file, &folder.join(&name))?;
                        at += 3 + length;
                    } else {
                        let (file, folder) = child_file(file, folder, &name, path_attribute.take())?;
                        self.file(child, &file, &folder)?;
                        at += 3;
                    }
                    (visible, path_attribute, exported) = (false, None, false);
                    continue;
                }
                "use" => {
                    let end = at + code[at..].iter().take_while(|token| token.text != ";").count();
                    self.import(module, &code[at + 1..end.min(code.len())], file, visible && depth == 0);
                    visible = false;
                    at = end + 1;
                    continue;
                }
                "macro_rules" if text(at + 1) == "!" => {
                    let name = text(at + 2).to_owned();
                    if exported {
                        self.exported_macros.insert(name.clone(), module);
                    }
                    self.modules[module].items.insert(name);
                    at += 3;
                    exported = false;
                    continue;
                }
                "fn" | "struct" | "enum" | "union" | "trait" | "type" | "const" | "static" if depth == 0 => {
                    let skipped = usize::from(matches!(text(at + 1), "mut" | "unsafe"));
                    self.modules[module].items.insert(text(at + 1 + skipped).to_owned());
                    (visible, exported, path_attribute) = (false, false, None);
                }
                "{" | "(" | "[" => depth += 1,
                "}" | ")" | "]" => depth -= 1,
                _ => {}
            }
            if code[at].kind == Kind::Word {
                at = self.path(module, code, at, file);
            } else {
                at += 1;
            }
        }
        Ok(())
    }

    /// Records the path that begins at `at`; returns where it ends.
    fn path(&mut self, module: Id, code: &[Token<'_>], at: usize, file: &Path) -> usize {
        let separator = |at: usize| {
            code.get(at).is_some_and(|token| token.text == ":")
                && code
                    .get(at + 1)
                    .is_some_and(|token| token.text == ":" && token.start == code[at].start + 1)
        };
        let mut path = vec![code[at].text.to_owned()];
        let mut end = at + 1;
        while separator(end) && code.get(end + 2).is_some_and(|token| token.kind == Kind::Word) {
            path.push(code[end + 2].text.to_owned());
            end += 3;
        }
        let from_outside = at >= 2 && separator(at - 2);
        let of_value = at >= 1 && code[at - 1].text == ".";
        if path.len() > 1 && !from_outside && !of_value {
            let (line, file) = (code[at].line, file.to_owned());
            self.modules[module].references.push(Reference { path, file, line, is_reexport: false });
        }
        end
    }

    fn import(&mut self, module: Id, code: &[Token<'_>], file: &Path, is_reexport: bool) {
        let mut found = Vec::new();
        use_tree(code, &mut 0, &[], &mut found);
        for (path, name, line) in found {
            let of = &mut self.modules[module];
            match name {
                Some(name) => drop(of.imports.insert(name, path.clone())),
                None => of.globs.push(path.clone()),
            }
            of.references.push(Reference { path, file: file.to_owned(), line, is_reexport });
        }
    }

    /// Returns the module that defines what `path` names in the code of `module`; `None` if that
    /// is outside of the crate or not a path of modules.
    pub(super) fn resolve(&self, module: Id, path: &[String]) -> Option<Id> {
        match self.target(module, path, 0)? {
            Target::Module(id) | Target::Item(id) => Some(id),
        }
    }

    fn target(&self, module: Id, path: &[String], depth: usize) -> Option<Target> {
        // Imports may refer to each other in a circle through globs.
        if depth > 12 {
            return None;
        }
        let (first, mut rest) = path.split_first()?;
        let mut current = match first.as_str() {
            "crate" => Target::Module(0),
            "self" => Target::Module(module),
            "super" => Target::Module(self.modules[module].parent?),
            // A name in scope that no import and no child explains belongs to another crate.
            name => self.member(module, name, depth)?,
        };
        while let (Target::Module(id), Some((name, after))) = (current, rest.split_first()) {
            rest = after;
            current = match name.as_str() {
                "self" => current,
                "super" => Target::Module(self.modules[id].parent?),
                name if self.is_foreign(id, name, depth) => return None,
                name => self.member(id, name, depth).unwrap_or(Target::Item(id)),
            };
        }
        Some(current)
    }

    /// Returns what `name` means in `module`, if its sources say so.
    fn member(&self, module: Id, name: &str, depth: usize) -> Option<Target> {
        let of = &self.modules[module];
        if let Some(child) = of.children.get(name) {
            return Some(Target::Module(*child));
        }
        if of.items.contains(name) {
            return Some(Target::Item(module));
        }
        if let Some(path) = of.imports.get(name)
            && path.first().is_none_or(|first| path.len() > 1 || first != name)
        {
            return self.target(module, path, depth + 1);
        }
        if module == 0
            && let Some(defining) = self.exported_macros.get(name)
        {
            return Some(Target::Item(*defining));
        }
        of.globs.iter().find_map(|path| match self.target(module, path, depth + 1)? {
            Target::Module(id) if id != module => self.member(id, name, depth + 1),
            // Variants of an enumeration.
            Target::Module(_) | Target::Item(_) => None,
        })
    }

    /// Returns whether `name` is imported from another crate.
    fn is_foreign(&self, module: Id, name: &str, depth: usize) -> bool {
        let of = &self.modules[module];
        !of.children.contains_key(name)
            && !of.items.contains(name)
            && of.imports.get(name).is_some_and(|path| self.target(module, path, depth + 1).is_none())
    }
}

/// Returns the file of `mod name;` in `file`, and the folder of that module's children.
fn child_file(file: &Path, folder: &Path, name: &str, path: Option<String>) -> Result<(PathBuf, PathBuf)> {
    if let Some(path) = path {
        let found = file.parent().unwrap_or(file).join(path);
        let inside =
            if found.ends_with("mod.rs") { found.with_file_name("") } else { found.with_extension("") };
        return Ok((found, inside));
    }
    let inside = folder.join(name);
    let candidates = [folder.join(format!("{name}.rs")), inside.join("mod.rs")];
    let found = candidates.into_iter().find(|candidate| candidate.exists());
    let missing = || format!("{}: no file for `mod {name}`", file.display());
    Ok((found.ok_or_else(missing)?, inside))
}

/// Reads one tree of a `use` declaration: paths, the names they are imported under and their lines.
fn use_tree(
    code: &[Token<'_>],
    at: &mut usize,
    prefix: &[String],
    found: &mut Vec<(Vec<String>, Option<String>, usize)>,
) {
    let mut path = prefix.to_vec();
    while let Some(token) = code.get(*at) {
        *at += 1;
        match token.text {
            ":" | "$" => {}
            "*" => return found.push((path, None, token.line)),
            "{" => {
                while code.get(*at).is_some_and(|token| token.text != "}") {
                    use_tree(code, at, &path, found);
                    *at += usize::from(code.get(*at).is_some_and(|token| token.text == ","));
                }
                *at += 1;
                return;
            }
            "as" => {
                let name = code.get(*at).map_or("_", |token| token.text).to_owned();
                *at += 1;
                return found.push((path, Some(name), token.line));
            }
            // `a::{self}` imports `a`.
            "self" if !path.is_empty() => {}
            word => path.push(word.to_owned()),
        }
        if code.get(*at).is_none_or(|token| matches!(token.text, "," | "}")) {
            let name = path.last().cloned();
            return found.push((path, name, token.line));
        }
    }
}

impl Tree {
    /// Shows files relative to `folder` from now on.
    pub(super) fn relative_to(&mut self, folder: &Path) {
        for reference in self.modules.iter_mut().flat_map(|module| &mut module.references) {
            if let Ok(short) = reference.file.strip_prefix(folder) {
                reference.file = short.to_owned();
            }
        }
    }

    /// Returns the path of a module from the root, as code writes it.
    pub(super) fn path_of(&self, id: Id) -> String {
        let of = &self.modules[id];
        of.parent.map_or_else(|| of.name.clone(), |parent| format!("{}::{}", self.path_of(parent), of.name))
    }
}
