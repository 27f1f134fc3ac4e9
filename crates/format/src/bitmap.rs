//! The allocation bitmap of a block group: one bit per block, set if the block is in use.
use crate::header::{HEADER_BYTES, Header};
use crate::units::{BLOCK_SIZE, BlockNumber, Generation, VolumeId};
use crate::{Features, FormatError, Geometry, Structure, Superblock};

/// Bytes of the bits of one group.
pub const BITMAP_BYTES: usize = (Geometry::GROUP_BLOCKS / 8) as usize;
const MAGIC: [u8; 4] = *b"CRNB";
const BITS_AT: usize = HEADER_BYTES + 16;
const LENGTH: usize = BITS_AT + BITMAP_BYTES;

/// The generation of a new volume, as mkfs makes it.
pub const GENERATION_OF_MKFS: Generation = Generation(1);

/// A bitmap slot, decoded. On disk: header, group number u64, reserved u64, bits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bitmap {
    /// The group that it describes.
    pub group: u64,
    /// The transaction whose state it describes.
    pub generation: Generation,
    /// Bit `i % 8` of byte `i / 8` belongs to block `i` of the group.
    pub bits: Box<[u8; BITMAP_BYTES]>,
}

/// Identifies a set of bitmaps: CRC-32C over their generations, in the order of groups. Never 0.
///
/// An older bitmap of a group is valid too, but marks blocks free that were used since. With this
/// checksum a reader notices an older bitmap in place of a damaged newer one.
pub fn bitmap_generations_checksum(generations: impl IntoIterator<Item = Generation>) -> u32 {
    let sum = generations
        .into_iter()
        .fold(0, |sum, generation| crc32c::crc32c_append(sum, &generation.0.to_le_bytes()));
    sum.max(1)
}

impl Bitmap {
    /// The sealed block for the slot at `address`.
    pub fn encode(&self, volume: VolumeId, address: BlockNumber) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK_SIZE];
        bytes[..HEADER_BYTES].copy_from_slice(zerocopy::IntoBytes::as_bytes(&Header::new(
            MAGIC,
            LENGTH,
            volume,
            address,
            self.generation,
        )));
        bytes[HEADER_BYTES..HEADER_BYTES + 8].copy_from_slice(&self.group.to_le_bytes());
        bytes[BITS_AT..LENGTH].copy_from_slice(&self.bits[..]);
        Header::seal(&mut bytes);
        bytes
    }

    /// The bitmap of a group without allocations: only blocks that can't be allocated are in use.
    pub fn initial(geometry: &Geometry, group: u64) -> Self {
        let mut bits: Box<[u8; BITMAP_BYTES]> =
            vec![0; BITMAP_BYTES].into_boxed_slice().try_into().expect("size matches");
        let first = group * Geometry::GROUP_BLOCKS;
        let allocatable = geometry.allocatable().range();
        let index_of = |block: u64| block.clamp(first, first + Geometry::GROUP_BLOCKS) - first;
        let (start, end) = (index_of(allocatable.start), index_of(allocatable.end));
        for index in (0..start).chain(end..Geometry::GROUP_BLOCKS) {
            bits[(index / 8) as usize] |= 1 << (index % 8);
        }
        Self { group, generation: GENERATION_OF_MKFS, bits }
    }

    /// Decodes the `bytes` of slot `slot` (0 or 1) of `group`.
    ///
    /// mkfs writes only the bitmaps of groups in which it allocated blocks. Slot 1 of every other
    /// group holds zeros, which stand for [`Bitmap::initial`]; the first transaction that changes
    /// the group writes slot 0. The zeros of a slot that lost its content are no bitmap of the
    /// superblock's set ([`bitmap_generations_checksum`]).
    ///
    /// # Errors
    /// If the slot is damaged, describes another group, or holds zeros that stand for no bitmap.
    pub fn decode_slot(
        bytes: &[u8],
        superblock: &Superblock,
        group: u64,
        slot: usize,
    ) -> Result<Self, FormatError> {
        let may_be_implicit =
            slot == 1 && superblock.features.incompatible & Features::IMPLICIT_BITMAPS != 0;
        if may_be_implicit && bytes.len() == BLOCK_SIZE && bytes.iter().all(|&byte| byte == 0) {
            return Ok(Self::initial(&superblock.geometry, group));
        }
        Self::decode(bytes, superblock.volume, superblock.geometry.bitmap_block(group, slot), group)
    }

    /// Decodes the slot read from `address` and checks that it describes `group`.
    ///
    /// # Errors
    /// If the slot is damaged or describes another group.
    pub fn decode(
        bytes: &[u8],
        volume: VolumeId,
        address: BlockNumber,
        group: u64,
    ) -> Result<Self, FormatError> {
        let header = Header::verify(bytes, MAGIC, Structure::Bitmap, Some(volume), address)?;
        let fail = |problem: String| Err(FormatError::new(Structure::Bitmap, address, problem));
        if header.length.get() as usize != LENGTH {
            return fail(format!("length {} instead of {LENGTH}", header.length));
        }
        let stored = u64::from_le_bytes(
            bytes[HEADER_BYTES..HEADER_BYTES + 8].try_into().expect("eight bytes"),
        );
        if stored != group {
            return fail(format!("describes group {stored} instead of {group}"));
        }
        let bits =
            bytes[BITS_AT..LENGTH].to_vec().into_boxed_slice().try_into().expect("length checked");
        Ok(Self { group, generation: Generation(header.generation.get()), bits })
    }
}
