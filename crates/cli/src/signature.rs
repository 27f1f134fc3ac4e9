//! What stands on a device already: recognises file systems and other owners of a device by their
//! signatures. So `mkfs` and `mount --create` overwrite nothing by mistake, and a command that
//! opens something else as a volume reports what it is.
use cairn_format::{BLOCK_SIZE, Geometry};
use rustix::fs::SeekFrom;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

struct Signature {
    offset_bytes: u64,
    magic: &'static [u8],
    name: &'static str,
    advice: &'static str,
}

const fn signature(offset_bytes: u64, magic: &'static [u8], name: &'static str) -> Signature {
    Signature { offset_bytes, magic, name, advice: FILE_SYSTEM }
}

const fn other(
    offset_bytes: u64,
    magic: &'static [u8],
    name: &'static str,
    advice: &'static str,
) -> Signature {
    Signature { offset_bytes, magic, name, advice }
}

/// What to do with what is no volume of Cairn.
const FILE_SYSTEM: &str = "mount(8) mounts it";
const OTHER_USE: &str = "it belongs to something else";
const TABLE: &str = "name one of its partitions";
const PACKED: &str = "unpack it first";
const NO_IMAGE: &str = "it is not a disk image";
const CONVERT: &str = "convert it to a raw image first (qemu-img convert -O raw)";

/// Cairn's own, at both superblock slots. Only the magic counts: a damaged volume, or one of a
/// newer version, is one too.
pub const CAIRN: &str = "a cairn volume";
const CAIRN_MAGIC: &[u8; 4] = b"CRNS";

/// One of several devices under a Cairn volume.
pub const MEMBER: &str = "a member of a cairn mirror or concatenation";

/// The more particular ones come first: a FAT boot sector ends like a partition table, for
/// instance.
const SIGNATURES: &[Signature] = &[
    signature(8 * 4096, b"CRNM", MEMBER),
    signature(24 * 4096, b"CRNM", MEMBER),
    signature(16 * 4096, CAIRN_MAGIC, CAIRN),
    signature(32 * 4096, CAIRN_MAGIC, CAIRN),
    signature(1024 + 56, &[0x53, 0xef], "an ext2, ext3 or ext4 file system"),
    signature(0, b"XFSB", "an XFS file system"),
    signature(65_536 + 64, b"_BHRfS_M", "a btrfs file system"),
    signature(
        4096 + 24,
        &[
            0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca, 0x82, 0x65, 0xf5, 0x7f, 0x48, 0xba,
            0x6d, 0x81,
        ],
        "a bcachefs file system",
    ),
    signature(1024, &[0x10, 0x20, 0xf5, 0xf2], "an F2FS file system"),
    signature(1024, &[0xe2, 0xe1, 0xf5, 0xe0], "an EROFS file system"),
    signature(32_768, b"JFS1", "a JFS file system"),
    signature(65_536 + 52, b"ReIsEr", "a ReiserFS file system"),
    other(128 * 1024, &[0x0c, 0xb1, 0xba, 0x00, 0, 0, 0, 0], "a ZFS pool", "zpool(8) imports it"),
    signature(0, b"hsqs", "a squashfs file system"),
    signature(32_769, b"CD001", "an ISO 9660 file system"),
    signature(3, b"NTFS    ", "an NTFS file system"),
    signature(3, b"EXFAT   ", "an exFAT file system"),
    signature(82, b"FAT32   ", "a FAT file system"),
    signature(54, b"FAT16   ", "a FAT file system"),
    signature(54, b"FAT12   ", "a FAT file system"),
    other(4096 - 10, b"SWAPSPACE2", "swap space", OTHER_USE),
    other(4096 - 10, b"SWAP-SPACE", "swap space", OTHER_USE),
    other(0, b"LUKS\xba\xbe", "a LUKS volume", "open it first (cryptsetup open)"),
    other(512, b"LABELONE", "an LVM physical volume", "name one of its logical volumes"),
    other(0, &[0xfc, 0x4e, 0x2b, 0xa9], "a RAID member", "name the array that it belongs to"),
    other(4096, &[0xfc, 0x4e, 0x2b, 0xa9], "a RAID member", "name the array that it belongs to"),
    other(0, &[0x1f, 0x8b, 8], "data compressed by gzip", PACKED),
    other(0, &[0xfd, b'7', b'z', b'X', b'Z', 0], "data compressed by xz", PACKED),
    other(0, &[0x28, 0xb5, 0x2f, 0xfd], "data compressed by zstd", PACKED),
    other(0, b"BZh", "data compressed by bzip2", PACKED),
    other(0, b"PK\x03\x04", "a zip archive", PACKED),
    other(257, b"ustar", "a tar archive", PACKED),
    other(0, b"QFI\xfb", "a disk image of QEMU (qcow2)", CONVERT),
    other(0, b"KDMV", "a disk image of VMware (VMDK)", CONVERT),
    other(0, b"\x7fELF", "a program", NO_IMAGE),
    other(0, b"%PDF-", "a PDF document", NO_IMAGE),
    other(512, b"EFI PART", "a GPT partition table", TABLE),
    other(510, &[0x55, 0xaa], "a boot sector or partition table", TABLE),
];

/// What `file` holds, if it is something known.
///
/// # Errors
/// What reading it answers; a file that is too short for a signature doesn't have it.
pub fn recognise(file: &File) -> io::Result<Option<&'static str>> {
    Ok(find(file)?.map(|signature| signature.name))
}

/// What to say of `file` when it can't be a volume, since none of the places of a superblock holds
/// one, nor a label of a member; `None` when it may be one.
///
/// # Errors
/// What reading it answers.
pub fn explain_foreign(file: &File) -> io::Result<Option<String>> {
    let length_bytes = rustix::fs::seek(file, SeekFrom::End(0))?;
    let blocks = length_bytes / BLOCK_SIZE as u64;
    let mut first = [0; CAIRN_MAGIC.len()];
    let at_end = blocks > 0 && {
        file.read_exact_at(&mut first, (blocks - 1) * BLOCK_SIZE as u64)?;
        first == *CAIRN_MAGIC
    };
    Ok(match find(file)? {
        Some(Signature { name, .. }) if at_end || *name == CAIRN || *name == MEMBER => None,
        None if at_end => None,
        Some(Signature { name, advice, .. }) => {
            Some(format!("it holds {name}, not a cairn volume: {advice}; `cairn mkfs --force` would overwrite it"))
        }
        None if length_bytes < Geometry::VOLUME_BYTES_MIN => {
            Some(format!("it has {length_bytes} bytes, but the smallest volume has {}; make a volume with `cairn mkfs`", Geometry::VOLUME_BYTES_MIN))
        }
        None => Some(
            "it holds no cairn superblock and no other known content; check that it is the right image, or make a volume with `cairn mkfs`"
                .into(),
        ),
    })
}

fn find(file: &File) -> io::Result<Option<&'static Signature>> {
    for signature in SIGNATURES {
        let mut found = [0; 16];
        let found = &mut found[..signature.magic.len()];
        match file.read_exact_at(found, signature.offset_bytes) {
            Ok(()) if found == signature.magic => return Ok(Some(signature)),
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_signature_is_recognised_and_nothing_else_is() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(recognise(&file).unwrap(), None, "an empty file");
        file.set_len(1 << 20).unwrap();
        assert_eq!(recognise(&file).unwrap(), None, "zeros");
        for signature in SIGNATURES {
            let file = tempfile::tempfile().unwrap();
            file.write_all_at(signature.magic, signature.offset_bytes).unwrap();
            assert_eq!(recognise(&file).unwrap(), Some(signature.name));
        }
    }
}
