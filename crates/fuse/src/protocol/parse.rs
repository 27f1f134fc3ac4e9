//! Parses the bytes of a request into a [`Request`].
use super::request::{ForgetList, Operation, Request, RequestHeader, WriteData};
use super::wire::{self, InHeader, opcode};
use rustix::fs::OFlags;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A request that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("request {unique} with opcode {opcode} is malformed: {what}")]
pub struct MalformedRequest {
    /// The request's number; 0 if not even the header could be read.
    pub unique: u64,
    /// Its opcode.
    pub opcode: u32,
    /// The problem with it.
    pub what: &'static str,
}

/// Parses the result of one read of the FUSE device.
///
/// ```
/// use cairn_fuse::protocol::{Operation, parse, wire::{InHeader, opcode}};
/// use zerocopy::IntoBytes;
/// let (opcode, unique, node) = (opcode::GETATTR, 2, 1);
/// let header = InHeader { length: 40, opcode, unique, node, ..InHeader::default() };
/// let request = parse(header.as_bytes())?;
/// assert!(matches!(request.operation, Operation::GetAttributes { of_open_file: false }));
/// assert!(parse(b"nonsense").is_err());
/// # Ok::<(), cairn_fuse::protocol::MalformedRequest>(())
/// ```
///
/// # Errors
/// If the bytes are no request.
pub fn parse(bytes: &[u8]) -> Result<Request<'_>, MalformedRequest> {
    let malformed = |unique, opcode, what| MalformedRequest { unique, opcode, what };
    let (header, body) = InHeader::read_from_prefix(bytes)
        .map_err(|_| malformed(0, 0, "shorter than its header"))?;
    check_length(&header, bytes.len())?;
    parse_parts(&header, body, &[])
}

/// Checks that the length read is that of the header.
///
/// # Errors
/// If it is not.
pub(crate) fn check_length(header: &InHeader, length_bytes: usize) -> Result<(), MalformedRequest> {
    let &InHeader { unique, opcode, .. } = header;
    let what = "length in the header is not the length read";
    if header.length as usize == length_bytes {
        Ok(())
    } else {
        Err(MalformedRequest { unique, opcode, what })
    }
}

/// Parses a request that arrived in parts: its header, the structure of its opcode (if it has one),
/// and the rest.
///
/// # Errors
/// If the bytes are no request.
pub fn parse_parts<'a>(
    header: &InHeader,
    structure: &'a [u8],
    rest: &'a [u8],
) -> Result<Request<'a>, MalformedRequest> {
    let mut body = RequestBody { now: structure, then: rest };
    // Extensions (supplementary groups, security contexts) are at the end; none is negotiated.
    let last = if body.then.is_empty() { &mut body.now } else { &mut body.then };
    *last = &last[..last.len().saturating_sub(usize::from(header.extension_words) * 8)];
    let &InHeader { unique, opcode, .. } = header;
    let operation =
        parse_operation(opcode, body).map_err(|what| MalformedRequest { unique, opcode, what })?;
    Ok(Request { header: request_header(header), operation })
}

/// Parses a WRITE whose data is in memory already.
///
/// # Errors
/// If the bytes are no WRITE.
pub(crate) fn parse_write<'a>(
    header: &InHeader,
    structure: &'a [u8],
    data: WriteData<'a>,
) -> Result<Request<'a>, MalformedRequest> {
    let &InHeader { unique, opcode, .. } = header;
    let write: Parsed<wire::WriteIn> = RequestBody { now: structure, then: &[] }.structure();
    let write = write.map_err(|what| MalformedRequest { unique, opcode, what })?;
    let operation = write_operation(write, data);
    Ok(Request { header: request_header(header), operation })
}

fn write_operation(write: wire::WriteIn, data: WriteData<'_>) -> Operation<'_> {
    Operation::Write {
        offset_bytes: write.offset,
        data,
        flags: write.write_flags,
        appends: OFlags::from_bits_retain(write.flags).contains(OFlags::APPEND),
    }
}

fn request_header(header: &InHeader) -> RequestHeader {
    let &InHeader { unique, opcode, node, uid, gid, pid, .. } = header;
    RequestHeader { unique, opcode, node, uid, gid, pid }
}

type Parsed<T> = Result<T, &'static str>;

/// The part of a request that is not parsed yet, in up to two pieces. Nothing is in both.
struct RequestBody<'a> {
    now: &'a [u8],
    then: &'a [u8],
}

impl<'a> RequestBody<'a> {
    /// The current piece.
    fn part(&mut self) -> &mut &'a [u8] {
        if self.now.is_empty() {
            self.now = std::mem::take(&mut self.then);
        }
        &mut self.now
    }

    fn structure<T: FromBytes>(&mut self) -> Parsed<T> {
        let part = self.part();
        let (value, rest) = T::read_from_prefix(part).map_err(|_| "shorter than its structure")?;
        *part = rest;
        Ok(value)
    }

    fn name(&mut self) -> Parsed<&'a [u8]> {
        let part = self.part();
        let end = part.iter().position(|&byte| byte == 0).ok_or("a name without its end")?;
        let name = &part[..end];
        *part = &part[end + 1..];
        Ok(name)
    }

    fn bytes(&mut self, length_bytes: u32) -> Parsed<&'a [u8]> {
        let part = self.part();
        let (bytes, rest) =
            part.split_at_checked(length_bytes as usize).ok_or("shorter than its data")?;
        *part = rest;
        Ok(bytes)
    }

    /// A structure that older kernels send shorter; missing fields are zero.
    fn structure_padded<T: FromBytes + IntoBytes + Immutable + KnownLayout + Default>(
        &mut self,
        length_bytes_min: usize,
    ) -> Parsed<T> {
        let part = self.part();
        if part.len() < length_bytes_min {
            return Err("shorter than its structure");
        }
        let mut value = T::default();
        let present = part.len().min(size_of::<T>());
        value.as_mut_bytes()[..present].copy_from_slice(&part[..present]);
        *part = &part[present..];
        Ok(value)
    }
}

fn parse_operation(number: u32, mut body: RequestBody<'_>) -> Parsed<Operation<'_>> {
    Ok(match number {
        opcode::INIT => Operation::Init(body.structure_padded(size_of::<wire::InitInShort>())?),
        opcode::DESTROY => Operation::Destroy,
        opcode::FORGET => Operation::Forget { count: body.structure::<wire::ForgetIn>()?.count },
        opcode::BATCH_FORGET => {
            let count = body.structure::<wire::BatchForgetIn>()?.count;
            let length_bytes = count
                .checked_mul(size_of::<wire::ForgetOne>() as u32)
                .ok_or("a count that overflows")?;
            Operation::BatchForget(ForgetList(body.bytes(length_bytes)?))
        }
        opcode::GETATTR => {
            let flags = body.structure::<wire::GetattrIn>().map_or(0, |getattr| getattr.flags);
            Operation::GetAttributes { of_open_file: flags & wire::GETATTR_OF_OPEN_FILE != 0 }
        }
        opcode::STATX => Operation::Statx { mask: body.structure::<wire::StatxIn>()?.mask },
        opcode::SETATTR => Operation::SetAttributes(body.structure()?),
        opcode::STATFS => Operation::StatFs,
        opcode::OPEN => Operation::Open,
        opcode::OPENDIR => Operation::OpenDirectory,
        opcode::RELEASE => Operation::Release,
        opcode::RELEASEDIR => Operation::ReleaseDirectory,
        opcode::FLUSH => Operation::Flush,
        opcode::ACCESS => Operation::Access,
        opcode::SYNCFS => Operation::SyncFs,
        opcode::FSYNC => Operation::Fsync { data_only: parse_data_only(&mut body)? },
        opcode::FSYNCDIR => Operation::FsyncDirectory { data_only: parse_data_only(&mut body)? },
        opcode::INTERRUPT => {
            Operation::Interrupt { unique: body.structure::<wire::InterruptIn>()?.unique }
        }
        opcode::NOTIFY_REPLY => Operation::NotifyReply,
        opcode::IOCTL => {
            let ioctl: wire::IoctlIn = body.structure()?;
            let input = body.bytes(ioctl.in_size)?;
            Operation::Ioctl { command: ioctl.command, input, out_length_bytes: ioctl.out_size }
        }
        opcode::SETXATTR | opcode::GETXATTR | opcode::LISTXATTR | opcode::REMOVEXATTR => {
            parse_xattr(number, body)?
        }
        opcode::READ
        | opcode::WRITE
        | opcode::READDIR
        | opcode::READDIRPLUS
        | opcode::FALLOCATE
        | opcode::LSEEK
        | opcode::COPY_FILE_RANGE
        | opcode::COPY_FILE_RANGE_64 => parse_data(number, body)?,
        _ => parse_names(number, body)?,
    })
}

fn parse_data_only(body: &mut RequestBody<'_>) -> Parsed<bool> {
    Ok(body.structure::<wire::FsyncIn>()?.flags & wire::FSYNC_DATA_ONLY != 0)
}

fn parse_names(number: u32, mut body: RequestBody<'_>) -> Parsed<Operation<'_>> {
    Ok(match number {
        opcode::LOOKUP => Operation::Lookup { name: body.name()? },
        opcode::READLINK => Operation::ReadLink,
        opcode::SYMLINK => Operation::Symlink { name: body.name()?, target: body.name()? },
        opcode::MKNOD => {
            let node: wire::MknodIn = body.structure()?;
            Operation::MakeNode { name: body.name()?, mode: node.mode, device: node.device }
        }
        opcode::MKDIR => {
            let directory: wire::MkdirIn = body.structure()?;
            Operation::MakeDirectory { name: body.name()?, mode: directory.mode }
        }
        opcode::UNLINK => Operation::Unlink { name: body.name()? },
        opcode::RMDIR => Operation::RemoveDirectory { name: body.name()? },
        opcode::RENAME => {
            let rename: wire::RenameIn = body.structure()?;
            Operation::Rename {
                old_name: body.name()?,
                new_parent: rename.new_parent,
                new_name: body.name()?,
                flags: 0,
            }
        }
        opcode::RENAME2 => {
            let rename: wire::Rename2In = body.structure()?;
            Operation::Rename {
                old_name: body.name()?,
                new_parent: rename.new_parent,
                new_name: body.name()?,
                flags: rename.flags,
            }
        }
        opcode::LINK => {
            let link: wire::LinkIn = body.structure()?;
            Operation::Link { node: link.node, new_name: body.name()? }
        }
        opcode::CREATE => {
            let create: wire::CreateIn = body.structure()?;
            Operation::Create { name: body.name()?, mode: create.mode }
        }
        opcode::TMPFILE => {
            Operation::TemporaryFile { mode: body.structure::<wire::CreateIn>()?.mode }
        }
        opcode => Operation::Unknown { opcode },
    })
}

fn parse_xattr(number: u32, mut body: RequestBody<'_>) -> Parsed<Operation<'_>> {
    Ok(match number {
        opcode::SETXATTR => {
            let set: wire::SetxattrIn = body.structure()?;
            Operation::SetXattr {
                name: body.name()?,
                value: body.bytes(set.size)?,
                flags: set.flags,
            }
        }
        opcode::GETXATTR => {
            let get: wire::GetxattrIn = body.structure()?;
            Operation::GetXattr { name: body.name()?, length_bytes: get.size }
        }
        opcode::LISTXATTR => {
            Operation::ListXattrs { length_bytes: body.structure::<wire::GetxattrIn>()?.size }
        }
        _ => Operation::RemoveXattr { name: body.name()? },
    })
}

fn parse_data(number: u32, mut body: RequestBody<'_>) -> Parsed<Operation<'_>> {
    Ok(match number {
        opcode::READ | opcode::READDIR | opcode::READDIRPLUS => {
            let wire::ReadIn { offset, size, .. } = body.structure()?;
            match number {
                opcode::READ => Operation::Read { offset_bytes: offset, length_bytes: size },
                opcode::READDIR => Operation::ReadDirectory { cookie: offset, length_bytes: size },
                _ => Operation::ReadDirectoryPlus { cookie: offset, length_bytes: size },
            }
        }
        opcode::WRITE => {
            let write: wire::WriteIn = body.structure()?;
            write_operation(write, WriteData::Bytes(body.bytes(write.size)?))
        }
        opcode::FALLOCATE => {
            let wire::FallocateIn { offset, length, mode, .. } = body.structure()?;
            Operation::Fallocate { offset_bytes: offset, length_bytes: length, mode }
        }
        opcode::LSEEK => {
            let wire::LseekIn { offset, whence, .. } = body.structure()?;
            Operation::Seek { offset_bytes: offset, whence }
        }
        _ => {
            let copy: wire::CopyFileRangeIn = body.structure()?;
            Operation::CopyFileRange {
                from_offset_bytes: copy.offset_in,
                to_node: copy.node_out,
                to_offset_bytes: copy.offset_out,
                length_bytes: copy.length,
                flags: copy.flags,
                wide: number == opcode::COPY_FILE_RANGE_64,
            }
        }
    })
}
