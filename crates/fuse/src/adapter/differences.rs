//! Requests about [differences](crate::differences), on the thread of the request.
use super::Answer;
use crate::differences;
use crate::directory_requests::{self, Comparison};
use cairn_engine::{InodeId, Volume};
use rustix::io::Errno;

/// Compares two states by their root directories. The kernel's data was `sent` to the server.
pub(super) fn serve(
    volume: &Volume,
    old: InodeId,
    new: InodeId,
    sent: bool,
    is_privileged: bool,
) -> Answer<directory_requests::Answer> {
    // It names files in directories that others may not read.
    if !is_privileged {
        return Err(Errno::PERM.into());
    }
    // What can change may lack data that the kernel has.
    let can_change = |root| Answer::Ok(volume.subvolume_of(root)?.1);
    let mut answer = directory_requests::Answer::default();
    answer.comparison = Some(if !sent && (can_change(old)? || can_change(new)?) {
        Comparison::MustSend
    } else {
        let found = volume.compare(old, new)?;
        answer.damage = found.damage.iter().map(ToString::to_string).collect();
        Comparison::Differences(differences::encode(&found.differences))
    });
    Ok(answer)
}
