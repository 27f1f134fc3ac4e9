//! What stands on a device already: recognises file systems and other owners of a device by their signatures, so that
//! `mkfs` and `mount --create` overwrite nothing by mistake.
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

struct Signature {
    offset_bytes: u64,
    magic: &'static [u8],
    name: &'static str,
}

const fn signature(offset_bytes: u64, magic: &'static [u8], name: &'static str) -> Signature {
    Signature { offset_bytes, magic, name }
}

/// Cairn's own, at both superblock slots. Only the magic counts: a damaged volume, or one of a newer version, is one too.
pub const CAIRN: &str = "a cairn volume";

/// One of several devices under a Cairn volume.
pub const MEMBER: &str = "a member of a cairn mirror or concatenation";

/// The more particular ones come first: a FAT boot sector ends like a partition table, for instance.
const SIGNATURES: &[Signature] = &[
    signature(8 * 4096, b"CRNM", MEMBER),
    signature(24 * 4096, b"CRNM", MEMBER),
    signature(16 * 4096, b"CRNS", CAIRN),
    signature(32 * 4096, b"CRNS", CAIRN),
    signature(1024 + 56, &[0x53, 0xef], "an ext2, ext3 or ext4 file system"),
    signature(0, b"XFSB", "an XFS file system"),
    signature(65_536 + 64, b"_BHRfS_M", "a btrfs file system"),
    signature(
        4096 + 24,
        &[0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca, 0x82, 0x65, 0xf5, 0x7f, 0x48, 0xba, 0x6d, 0x81],
        "a bcachefs file system",
    ),
    signature(1024, &[0x10, 0x20, 0xf5, 0xf2], "an F2FS file system"),
    signature(1024, &[0xe2, 0xe1, 0xf5, 0xe0], "an EROFS file system"),
    signature(32_768, b"JFS1", "a JFS file system"),
    signature(65_536 + 52, b"ReIsEr", "a ReiserFS file system"),
    signature(128 * 1024, &[0x0c, 0xb1, 0xba, 0x00, 0, 0, 0, 0], "a ZFS pool"),
    signature(0, b"hsqs", "a squashfs file system"),
    signature(32_769, b"CD001", "an ISO 9660 file system"),
    signature(3, b"NTFS    ", "an NTFS file system"),
    signature(3, b"EXFAT   ", "an exFAT file system"),
    signature(82, b"FAT32   ", "a FAT file system"),
    signature(54, b"FAT16   ", "a FAT file system"),
    signature(54, b"FAT12   ", "a FAT file system"),
    signature(4096 - 10, b"SWAPSPACE2", "swap space"),
    signature(4096 - 10, b"SWAP-SPACE", "swap space"),
    signature(0, b"LUKS\xba\xbe", "a LUKS volume"),
    signature(512, b"LABELONE", "an LVM physical volume"),
    signature(0, &[0xfc, 0x4e, 0x2b, 0xa9], "a RAID member"),
    signature(4096, &[0xfc, 0x4e, 0x2b, 0xa9], "a RAID member"),
    signature(512, b"EFI PART", "a GPT partition table"),
    signature(510, &[0x55, 0xaa], "a boot sector or partition table"),
];

/// What `file` holds, if it is something known.
///
/// # Errors
/// What reading it answers; a file that is too short for a signature doesn't have it.
pub fn recognise(file: &File) -> io::Result<Option<&'static str>> {
    for signature in SIGNATURES {
        let mut found = [0; 16];
        let found = &mut found[..signature.magic.len()];
        match file.read_exact_at(found, signature.offset_bytes) {
            Ok(()) if found == signature.magic => return Ok(Some(signature.name)),
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
