//! The header at the beginning of every structure.
use crate::units::{BlockNumber, Generation, VolumeId};
use crate::{FORMAT_VERSION, FormatError, Structure, checksum};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a [`Header`].
pub const HEADER_BYTES: usize = size_of::<Header>();

/// The beginning of every structure. The checksum covers `length` bytes from the header's first,
/// with the checksum field itself as zero.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    /// Kind of structure, four letters.
    pub magic: [u8; 4],
    /// CRC-32C.
    pub checksum: U32,
    /// [`FORMAT_VERSION`] of the writer.
    pub version: U16,
    /// Zero; reserved.
    pub reserved: U16,
    /// Bytes covered by the checksum, header included.
    pub length: U32,
    /// The volume of this structure.
    pub volume: [u8; 16],
    /// The address of this structure, in blocks.
    pub address: U64,
    /// Transaction that wrote it.
    pub generation: U64,
}

impl Header {
    /// A header without a checksum; [`Header::seal`] adds it.
    pub fn new(
        magic: [u8; 4],
        length: usize,
        volume: VolumeId,
        address: BlockNumber,
        generation: Generation,
    ) -> Self {
        Self {
            magic,
            checksum: U32::ZERO,
            version: U16::new(FORMAT_VERSION),
            reserved: U16::ZERO,
            length: U32::new(u32::try_from(length).expect("a structure is smaller than 4 GiB")),
            volume: volume.0,
            address: U64::new(address.0),
            generation: U64::new(generation.0),
        }
    }

    /// Computes the checksum of the structure in `bytes` (whose header's `length` is set) and
    /// stores it there.
    pub fn seal(bytes: &mut [u8]) {
        let length = u32::from_le_bytes(bytes[12..16].try_into().expect("four bytes")) as usize;
        bytes[4..8].fill(0);
        let sum = checksum(&bytes[..length]);
        bytes[4..8].copy_from_slice(&sum.to_le_bytes());
    }

    /// Checks magic, version, length, checksum, volume (if given) and address, in this order.
    ///
    /// # Errors
    /// The first check that fails.
    pub fn verify(
        bytes: &[u8],
        magic: [u8; 4],
        structure: Structure,
        volume: Option<VolumeId>,
        address: BlockNumber,
    ) -> Result<Self, FormatError> {
        let fail = |problem: String| Err(FormatError::new(structure, address, problem));
        let Ok((header, _)) = Header::read_from_prefix(bytes) else {
            return fail(format!("only {} bytes", bytes.len()));
        };
        if header.magic != magic {
            return fail(format!("bad magic {:02x?}, expected {:02x?}", header.magic, magic));
        }
        let length = header.length.get() as usize;
        if length < HEADER_BYTES || length > bytes.len() {
            return fail(format!("impossible length {length}"));
        }
        let sum = crc32c::crc32c_append(
            crc32c::crc32c_append(checksum(&bytes[..4]), &[0; 4]),
            &bytes[8..length],
        );
        if sum != header.checksum.get() {
            return fail(format!(
                "checksum mismatch: stored {:08x}, computed {sum:08x}",
                header.checksum.get()
            ));
        }
        if header.version.get() == 0 || header.version.get() > FORMAT_VERSION {
            return fail(format!(
                "format version {} is not supported (this program reads up to {FORMAT_VERSION})",
                header.version
            ));
        }
        if volume.is_some_and(|v| v.0 != header.volume) {
            return fail(format!("belongs to volume {}", VolumeId(header.volume)));
        }
        if header.address.get() != address.0 {
            return fail(format!("was written for block {}", header.address));
        }
        Ok(header)
    }
}
