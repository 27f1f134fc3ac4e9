//! The loads of every day: their names, their programs, and whether they have clients.

/// An everyday load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Everyday {
    /// Unpacks the sources of a program.
    Untar,
    /// Makes them durable, just unpacked.
    Sync,
    /// Searches them, just unpacked.
    Grep,
    /// Copies them.
    Copy,
    /// Looks at the attributes of all of them.
    Find,
    /// Removes them.
    Remove,
    /// Clones a repository.
    Git,
    /// Builds a crate.
    CargoBuild,
    /// Unpacks very many tiny files in deep folders.
    NpmLike,
    /// Rows in a database, each a transaction.
    Sqlite,
    /// Rows in a database, all of them one transaction.
    SqliteLoad,
    /// Writes a large file from end to end.
    SeqWrite,
    /// Reads a large file from end to end, nothing of it cached.
    SeqRead,
    /// Reads blocks of a large file at random, nothing of it cached.
    RandRead,
    /// Overwrites blocks of one file at random, with an fdatasync after each.
    OneFileFdatasync,
    /// The same, each client in its own file.
    OwnFilesFdatasync,
}

impl Everyday {
    /// All of them.
    pub const ALL: [Everyday; 16] = [
        Everyday::Untar,
        Everyday::Sync,
        Everyday::Grep,
        Everyday::Copy,
        Everyday::Find,
        Everyday::Remove,
        Everyday::Git,
        Everyday::CargoBuild,
        Everyday::NpmLike,
        Everyday::Sqlite,
        Everyday::SqliteLoad,
        Everyday::SeqWrite,
        Everyday::SeqRead,
        Everyday::RandRead,
        Everyday::OneFileFdatasync,
        Everyday::OwnFilesFdatasync,
    ];

    /// Its name in tables and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Everyday::Untar => "untar",
            Everyday::Sync => "sync",
            Everyday::Grep => "grep",
            Everyday::Copy => "cp",
            Everyday::Find => "find",
            Everyday::Remove => "rm",
            Everyday::Git => "git",
            Everyday::CargoBuild => "cargo-build",
            Everyday::NpmLike => "npm-like",
            Everyday::Sqlite => "sqlite",
            Everyday::SqliteLoad => "sqlite-load",
            Everyday::SeqWrite => "seq-write",
            Everyday::SeqRead => "seq-read",
            Everyday::RandRead => "rand-read",
            Everyday::OneFileFdatasync => "one-file-fdatasync",
            Everyday::OwnFilesFdatasync => "own-files-fdatasync",
        }
    }

    /// The programs that it needs, each with its package.
    pub fn commands(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Everyday::Untar | Everyday::NpmLike => &[("tar", "tar")],
            Everyday::Sync => &[("tar", "tar"), ("sync", "coreutils")],
            Everyday::Grep => &[("tar", "tar"), ("grep", "grep")],
            Everyday::Copy => &[("tar", "tar"), ("cp", "coreutils")],
            Everyday::Find => &[("tar", "tar"), ("find", "findutils")],
            Everyday::Remove => &[("tar", "tar"), ("rm", "coreutils")],
            Everyday::Git => &[("git", "git")],
            Everyday::CargoBuild => &[("cargo", "cargo"), ("cc", "gcc")],
            Everyday::Sqlite | Everyday::SqliteLoad => &[("sqlite3", "sqlite3")],
            Everyday::SeqWrite | Everyday::SeqRead | Everyday::RandRead => &[("fio", "fio")],
            Everyday::OneFileFdatasync | Everyday::OwnFilesFdatasync => &[("fio", "fio")],
        }
    }

    /// Numbers of clients that it is measured with; empty for one that is a single caller.
    pub fn usual_clients(self) -> &'static [usize] {
        match self {
            Everyday::SeqRead | Everyday::RandRead => &[1, 32],
            Everyday::OneFileFdatasync | Everyday::OwnFilesFdatasync => &[1, 8, 32],
            _ => &[],
        }
    }
}
