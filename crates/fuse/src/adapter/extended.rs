//! Extended attributes, including the synthetic ones of the root directory: [`XATTR_STATISTICS`],
//! [`XATTR_SERVER`] and [`XATTR_SHUTDOWN`].
use super::{Answer, VolumeHandler, answer, answer_bytes, answer_status, fail};
use crate::control::{XATTR_SERVER, XATTR_SHUTDOWN, XATTR_STATISTICS};
use crate::protocol::wire::GetxattrOut;
use crate::protocol::{Operation, ROOT_NODE, RequestHeader};
use crate::transport::Reply;
use cairn_engine::{InodeId, XattrMode};
use rustix::fs::XattrFlags;
use rustix::io::Errno;

/// Namespaces that the volume stores. `system.` holds access control lists, which Cairn does not
/// enforce.
const NAMESPACES: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
const ROOT_USER: u32 = 0;

fn check_namespace(name: &[u8]) -> Result<(), Errno> {
    let rest = NAMESPACES.iter().find_map(|namespace| name.strip_prefix(*namespace));
    match rest {
        Some([]) => Err(Errno::INVAL),
        Some(_) => Ok(()),
        None => Err(Errno::OPNOTSUPP),
    }
}

pub(super) fn is_made_up(node: u64, name: &[u8]) -> bool {
    node == ROOT_NODE
        && [XATTR_STATISTICS, XATTR_SERVER, XATTR_SHUTDOWN].iter().any(|own| own.as_bytes() == name)
}

fn set_mode(flags: u32) -> Answer<XattrMode> {
    match XattrFlags::from_bits(flags) {
        Some(flags) if flags.is_empty() => Ok(XattrMode::Any),
        Some(XattrFlags::CREATE) => Ok(XattrMode::Create),
        Some(XattrFlags::REPLACE) => Ok(XattrMode::Replace),
        _ => Err(Errno::INVAL.into()),
    }
}

/// Sends `value`, or its length if the caller asks for 0 bytes.
fn answer_sized(reply: Reply, result: Answer<Vec<u8>>, length_bytes: u32) {
    match result {
        Ok(value) if length_bytes == 0 => {
            answer(reply, Ok(GetxattrOut { size: value.len() as u32, padding: 0 }))
        }
        Ok(value) if value.len() > length_bytes as usize => fail(reply, &Errno::RANGE.into()),
        result => answer_bytes(reply, result),
    }
}

/// Answers for an object without attributes.
pub(super) fn answer_no_names(reply: Reply, length_bytes: u32) {
    answer_sized(reply, Ok(Vec::new()), length_bytes);
}

impl VolumeHandler {
    pub(super) fn handle_xattr(
        &self,
        header: &RequestHeader,
        operation: &Operation<'_>,
        reply: Reply,
    ) {
        let node = InodeId(header.node);
        match *operation {
            Operation::GetXattr { name, length_bytes } => {
                answer_sized(reply, self.get_xattr(node, name), length_bytes)
            }
            Operation::ListXattrs { length_bytes } => {
                answer_sized(reply, self.list_xattrs(header), length_bytes)
            }
            Operation::SetXattr { name, value, flags } => {
                answer_status(
                    reply,
                    self.set_xattr(node, name, value, flags)
                        .and_then(|()| self.settle_change(node)),
                );
            }
            Operation::RemoveXattr { name } => {
                answer_status(
                    reply,
                    self.remove_xattr(node, name).and_then(|()| self.settle_change(node)),
                );
            }
            _ => reply.error(Errno::NOSYS),
        }
    }

    fn get_xattr(&self, node: InodeId, name: &[u8]) -> Answer<Vec<u8>> {
        if is_made_up(node.0, name) {
            return self.made_up_value(name);
        }
        check_namespace(name)?;
        Ok(self.volume.get_xattr(node, name)?)
    }

    fn made_up_value(&self, name: &[u8]) -> Answer<Vec<u8>> {
        if name == XATTR_SERVER.as_bytes() {
            return Ok(std::process::id().to_string().into_bytes());
        }
        if name == XATTR_SHUTDOWN.as_bytes() {
            return if self.shutdown.has_begun() {
                Ok(b"1".to_vec())
            } else {
                Err(Errno::NODATA.into())
            };
        }
        // As text, since a `Value` would not keep the order: failures come first.
        let statistics = serde_json::to_string(&self.volume.statistics()).map_err(|_| Errno::IO)?;
        let fields = statistics.strip_suffix('}').ok_or(Errno::IO)?;
        Ok(format!("{fields},\"requests\":{}}}", self.requests.to_json()).into_bytes())
    }

    fn list_xattrs(&self, header: &RequestHeader) -> Answer<Vec<u8>> {
        let names = self.volume.list_xattrs(InodeId(header.node))?;
        // As in other file systems, only root sees the names of trusted attributes.
        // What other namespaces hold is Cairn's own.
        let shown = names.iter().filter(|name| {
            check_namespace(name).is_ok()
                && (header.uid == ROOT_USER || !name.starts_with(b"trusted."))
        });
        Ok(shown.flat_map(|name| [name.as_slice(), b"\0"]).flatten().copied().collect())
    }

    fn set_xattr(&self, node: InodeId, name: &[u8], value: &[u8], flags: u32) -> Answer<()> {
        if is_made_up(node.0, name) {
            return Err(Errno::PERM.into());
        }
        check_namespace(name)?;
        Ok(self.volume.set_xattr(node, name, value, set_mode(flags)?)?)
    }

    fn remove_xattr(&self, node: InodeId, name: &[u8]) -> Answer<()> {
        if is_made_up(node.0, name) {
            return Err(Errno::PERM.into());
        }
        check_namespace(name)?;
        Ok(self.volume.remove_xattr(node, name)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_stored_namespaces_pass() {
        for name in [&b"user.a"[..], b"trusted.b", b"security.capability"] {
            assert_eq!(check_namespace(name), Ok(()));
        }
        for name in [&b"system.posix_acl_access"[..], b"", b"user", b"other.x"] {
            assert_eq!(check_namespace(name), Err(Errno::OPNOTSUPP));
        }
        // The kernel refuses them for its own file systems.
        for name in NAMESPACES {
            assert_eq!(check_namespace(name), Err(Errno::INVAL));
        }
        assert!(
            is_made_up(ROOT_NODE, b"user.cairn.statistics")
                && is_made_up(ROOT_NODE, b"user.cairn.server")
        );
        assert!(
            !is_made_up(2, b"user.cairn.statistics") && !is_made_up(ROOT_NODE, b"user.cairn.other")
        );
    }

    #[test]
    fn set_flags_are_distinguished() {
        assert_eq!(set_mode(0).ok(), Some(XattrMode::Any));
        assert_eq!(set_mode(1).ok(), Some(XattrMode::Create));
        assert_eq!(set_mode(2).ok(), Some(XattrMode::Replace));
        assert_eq!(set_mode(3).unwrap_err().errno(), Errno::INVAL);
    }
}
