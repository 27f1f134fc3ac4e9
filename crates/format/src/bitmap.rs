//! Allocation bitmap of one block group: one bit per block, set when the block is in use.
use crate::header::{HEADER_BYTES, Header};
use crate::units::{BLOCK_SIZE, BlockNumber, Generation, VolumeId};
use crate::{Features, FormatError, Geometry, Structure, Superblock};

/// Bytes of the bits of one group.
pub const BITMAP_BYTES: usize = (Geometry::GROUP_BLOCKS / 8) as usize;
const MAGIC: [u8; 4] = *b"CRNB";
const BITS_AT: usize = HEADER_BYTES + 16;
const LENGTH: usize = BITS_AT + BITMAP_BYTES;

/// Generation of the volume that mkfs makes.
const GENERATION_OF_MKFS: Generation = Generation(1);

/// A bitmap slot, decoded. On disk: header, group number u64, reserved u64, bits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bitmap {
    /// The group that it describes.
    pub group: u64,
    /// Transaction whose state it is.
    pub generation: Generation,
    /// Bit `i % 8` of byte `i / 8` belongs to block `i` of the group.
    pub bits: Box<[u8; BITMAP_BYTES]>,
}

/// Tells a set of bitmaps from every other: CRC-32C over their generations, in the order of groups.
/// Never 0.
///
/// An older bitmap of a group is valid too, but calls free what was used since; with this a reader
/// notices when one stands in for a newer one that is damaged.
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

    /// The bitmap of a group in which nothing has been allocated: in use is only what can't be
    /// allocated.
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

    /// What slot `slot` (0 or 1) of `group` says, of which `bytes` were read.
    ///
    /// mkfs writes only the bitmaps of groups in which it allocated something. Every other group's
    /// slot 1 holds zeros, which stand for [`Bitmap::initial`]; the first transaction that changes
    /// the group writes slot 0. A slot that lost its content is no bitmap of the set that the
    /// superblock names ([`bitmap_generations_checksum`]), whatever its zeros stand for.
    ///
    /// # Errors
    /// Damage, a bitmap of another group, or zeros that stand for nothing.
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
    /// Damage, or a bitmap of another group.
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
