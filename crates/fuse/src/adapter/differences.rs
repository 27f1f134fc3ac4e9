//! Requests about [differences](crate::differences), on the thread of the request.
use super::Answer;
use super::kept_texts::{KeptTexts, Part};
use crate::differences;
use crate::directory_requests::{self, Differences, DifferencesRequest as Request};
use cairn_engine::{InodeId, Volume};
use rustix::io::Errno;
use std::sync::Arc;

/// Serves a request to the root directory of the older state.
pub(super) fn serve(
    volume: &Volume,
    kept: &Arc<KeptTexts>,
    old: InodeId,
    is_privileged: bool,
    request: &Request,
) -> Answer<directory_requests::Answer> {
    // It names files in directories that others may not read.
    if !is_privileged {
        return Err(Errno::PERM.into());
    }
    let answer = |differences, more| directory_requests::Answer {
        differences: Some(differences),
        more,
        ..directory_requests::Answer::default()
    };
    let Part { number, text, more } = match *request {
        Request::Begin { new, sent } => {
            let new = InodeId(new);
            // What can change may lack data that the kernel has.
            let can_change = |root| Answer::Ok(volume.subvolume_of(root)?.1);
            if !sent && (can_change(old)? || can_change(new)?) {
                let must_send = Differences { must_send: true, ..Differences::default() };
                return Ok(answer(must_send, false));
            }
            kept.begin(differences::encode(&volume.differences(old, new)?), 0)
        }
        Request::Continue { number, from } => kept.part(number, from)?,
    };
    Ok(answer(Differences { number, text, must_send: false }, more))
}
