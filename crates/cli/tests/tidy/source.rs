//! The workspace as the rules see it: crates with their imports, and Rust files without comments
//! and literals.
use std::fs;
use std::path::{Path, PathBuf};

/// The workspace's folder.
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace")
}

/// A crate of the workspace and what it imports of the others, without the prefix `cairn-`.
pub struct Member {
    pub name: String,
    pub dependencies: Vec<String>,
    pub development_dependencies: Vec<String>,
}

/// All crates of the workspace.
pub fn crates() -> Vec<Member> {
    let mut folders: Vec<PathBuf> = fs::read_dir(workspace().join("crates"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    folders.sort();
    folders.retain(|folder| folder.join("Cargo.toml").exists());
    folders.iter().map(|folder| read_member(folder)).collect()
}

fn read_member(folder: &Path) -> Member {
    let text = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
    let manifest: toml::Table =
        text.parse().unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let imports = |sections: &[&str]| {
        let tables = sections.iter().filter_map(|section| manifest.get(*section)?.as_table());
        tables
            .flat_map(toml::Table::keys)
            .filter_map(|name| name.strip_prefix("cairn-").map(str::to_owned))
            .collect()
    };
    Member {
        name: folder.file_name().unwrap().to_string_lossy().into_owned(),
        dependencies: imports(&["dependencies", "build-dependencies"]),
        development_dependencies: imports(&["dev-dependencies"]),
    }
}

/// A Rust file: its text, and its code, in which comments and literals are blanks.
pub struct SourceFile {
    /// Relative to the workspace.
    pub path: String,
    pub text: String,
    code: String,
}

/// All Rust files of the workspace.
pub fn rust_files() -> Vec<SourceFile> {
    let root = workspace();
    let mut files = Vec::new();
    let mut folders = vec![root.join("crates")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let relative = path.strip_prefix(&root).unwrap().to_string_lossy().into_owned();
                files.push(SourceFile::new(&relative, fs::read_to_string(&path).unwrap()));
            }
        }
    }
    assert!(files.len() > 20, "only {} Rust files were found", files.len());
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}

impl SourceFile {
    pub fn new(path: &str, text: String) -> Self {
        let code = without_comments_and_literals(&text);
        Self { path: path.to_owned(), text, code }
    }

    pub fn is_test(&self) -> bool {
        self.path.ends_with("_tests.rs") || self.path.contains("/tests/")
    }

    /// Whether `line` belongs to a test: of a test file, or of the test module that ends a file.
    pub fn is_test_at(&self, line: usize) -> bool {
        let is_test = |text: &str| text == "#[cfg(test)]" || text.starts_with("#[cfg(all(test,");
        let module_at = self.text.lines().position(is_test);
        self.is_test() || module_at.is_some_and(|start| line > start)
    }

    /// Whether a string or a character stands on `line`, wholly or in part.
    pub fn has_literal_at(&self, line: usize) -> bool {
        let of = |text: &str| text.lines().nth(line - 1).unwrap_or_default().trim_end().to_owned();
        let (text, code) = (of(&self.text), of(&self.code));
        text.split("//").next().unwrap_or_default().trim_end() != code && text != code
    }

    /// The line in which the code mentions `call` or imports it; paths may be broken up by braces.
    pub fn mentions(&self, call: &str) -> Option<usize> {
        self.at(call, |_, _| true).or_else(|| {
            let imports = self.imports();
            let imported = |wanted: &str| {
                imports
                    .iter()
                    .find(|(_, path)| path.strip_suffix("::self").unwrap_or(path) == wanted)
            };
            let through_its_module = || {
                let (parent, _) =
                    call.rsplit_once("::").filter(|(parent, _)| imported(parent).is_some())?;
                let module_at = parent.rfind("::").map_or(0, |at| at + 2);
                self.at(&call[module_at..], |_, _| true)
            };
            imported(call).map(|(line, _)| *line).or_else(through_its_module)
        })
    }

    /// The line in which the code has `word`, standing alone.
    pub fn word(&self, word: &str) -> Option<usize> {
        self.at(word, |before, after| !is_word(before) && !is_word(after))
    }

    /// The lock ranks that the code names.
    pub fn ranks(&self) -> Vec<String> {
        let name = |rest: &str| rest.chars().take_while(|c| is_word(Some(*c))).collect::<String>();
        let names = self.code.split("Rank::").skip(1).map(name);
        names
            .filter(|name| {
                name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
                    && !name.is_empty()
                    && name != "ALL"
            })
            .collect()
    }

    fn at(&self, wanted: &str, fits: impl Fn(Option<char>, Option<char>) -> bool) -> Option<usize> {
        let (position, _) = self.code.match_indices(wanted).find(|(position, _)| {
            let before = self.code[..*position].chars().next_back();
            !is_word(before) && fits(before, self.code[position + wanted.len()..].chars().next())
        })?;
        Some(self.line(position))
    }

    fn line(&self, position: usize) -> usize {
        self.code[..position].matches('\n').count() + 1
    }

    /// Every path that a `use` brings in or that begins with `crate`, `super` or `self`, with its
    /// line.
    pub fn paths(&self) -> Vec<(usize, String)> {
        let mut paths = self.imports();
        for start in ["crate::", "super::", "self::"] {
            for (position, _) in self.code.match_indices(start) {
                if !is_word(self.code[..position].chars().next_back()) {
                    let rest = &self.code[position..];
                    let end = rest.find(|c| !is_word(Some(c)) && c != ':').unwrap_or(rest.len());
                    paths.push((self.line(position), rest[..end].to_owned()));
                }
            }
        }
        paths
    }

    /// Every path that a `use` brings in, with its line.
    fn imports(&self) -> Vec<(usize, String)> {
        let mut imports = Vec::new();
        for (position, _) in self.code.match_indices("use ") {
            let before = self.code[..position].chars().next_back();
            let statement = self.code[position + 4..].split(';').next().unwrap_or_default();
            if !is_word(before) && !statement.contains('(') {
                let mut paths = Vec::new();
                expand("", &statement.split_whitespace().collect::<String>(), &mut paths);
                imports.extend(paths.into_iter().map(|path| (self.line(position), path)));
            }
        }
        imports
    }
}

/// Adds the paths of the `use` tree `tree`, each behind `prefix`.
fn expand(prefix: &str, tree: &str, paths: &mut Vec<String>) {
    let Some((head, rest)) = tree.split_once('{') else {
        return paths.push(format!("{prefix}{tree}"));
    };
    let inner = rest.strip_suffix('}').unwrap_or(rest);
    let mut depth = 0;
    let parts = inner.split(|c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ',' && depth == 0
    });
    for part in parts.filter(|part| !part.is_empty()) {
        expand(&format!("{prefix}{head}"), part, paths);
    }
}

fn is_word(character: Option<char>) -> bool {
    character.is_some_and(|c| c.is_alphanumeric() || c == '_')
}

/// The same text with blanks instead of comments, strings and characters; line ends stay.
fn without_comments_and_literals(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let length =
            literal_or_comment_length(&bytes[at..], at.checked_sub(1).map(|before| bytes[before]));
        let blank = &mut code[at..at + length.unwrap_or(0)];
        blank.iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
        at += length.unwrap_or(1);
    }
    String::from_utf8_lossy(&code).into_owned()
}

fn literal_or_comment_length(rest: &[u8], before: Option<u8>) -> Option<usize> {
    let until = |end: &[u8], from: usize| {
        let found = rest[from..].windows(end.len()).position(|window| window == end);
        found.map_or(rest.len(), |position| from + position + end.len())
    };
    match rest {
        [b'/', b'/', ..] => Some(until(b"\n", 2)),
        [b'/', b'*', ..] => Some(until(b"*/", 2)),
        [b'"', ..] => Some(quoted_length(rest, b'"')),
        [b'r', b'"' | b'#', ..] if !is_word(before.map(char::from)) || before == Some(b'b') => {
            let hashes = rest[1..].iter().take_while(|byte| **byte == b'#').count();
            let end: Vec<u8> =
                std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
            (rest.get(1 + hashes) == Some(&b'"')).then(|| until(&end, hashes + 2))
        }
        // A character, not a lifetime: it ends with a quote after one character or an escape.
        [b'\'', b'\\', ..] => Some(quoted_length(rest, b'\'')),
        [b'\'', ..] => {
            let character =
                std::str::from_utf8(&rest[1..rest.len().min(5)]).unwrap_or_else(|error| {
                    std::str::from_utf8(&rest[1..1 + error.valid_up_to()]).unwrap_or_default()
                });
            let length = character.chars().next()?.len_utf8();
            (rest.get(1 + length) == Some(&b'\'')).then_some(length + 2)
        }
        _ => None,
    }
}

fn quoted_length(rest: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != quote {
        at += if rest[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(rest.len())
}
