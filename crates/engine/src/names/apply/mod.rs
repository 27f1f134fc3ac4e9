//! Applies what has changed in a fork to the subvolume that it came from.
use super::Names;
use crate::types::{Apply, Winner};
use crate::{Error, InodeId, Result};

impl Names {
    /// The root directory of the subvolume that a fork came from, or of what has its place.
    pub(crate) fn origin_of_fork(&self, _fork: InodeId) -> Result<InodeId> {
        Err(Error::InvalidArgument("not yet"))
    }

    /// Applies the changes of a fork.
    pub(crate) fn apply(&self, _fork: InodeId, _winner: Winner) -> Result<Apply> {
        Err(Error::InvalidArgument("not yet"))
    }
}
