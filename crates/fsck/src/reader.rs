//! Reads blocks and nodes, neighbours together.
use cairn_blockdev::{AlignedBuffer, BlockDevice, DeviceError, read_verified};
use cairn_format::{
    BLOCK_SIZE, BlockNumber, BlockRange, Geometry, NODE_BLOCKS, NODE_SIZE, Node, VolumeId, checksum,
};

/// Nodes per read: 1 MiB.
pub(crate) const NODES_PER_READ: usize = 64;

/// What is wrong with a pointer to a place where no node can be.
pub(crate) const OUTSIDE: &str = "a pointer to it leads outside the volume, or between nodes";

/// Reads from one volume.
#[derive(Clone, Copy)]
pub(crate) struct Reader<'a> {
    pub(crate) device: &'a dyn BlockDevice,
    pub(crate) volume: VolumeId,
    pub(crate) geometry: Geometry,
}

/// Reads `range` of the device.
pub(crate) fn read_blocks(
    device: &dyn BlockDevice,
    range: BlockRange,
) -> Result<AlignedBuffer, DeviceError> {
    let mut buffer = AlignedBuffer::zeroed(range.blocks as usize * BLOCK_SIZE);
    device.read(range.start.offset_bytes(), &mut buffer)?;
    Ok(buffer)
}

/// Reads and decodes `range` from any good copy, or returns the problem in words.
pub(crate) fn read_decoded<T>(
    device: &dyn BlockDevice,
    range: BlockRange,
    decode: impl FnMut(&[u8]) -> Result<T, String>,
) -> Result<T, String> {
    let mut buffer = AlignedBuffer::zeroed(range.blocks as usize * BLOCK_SIZE);
    read_verified(device, range.start.offset_bytes(), &mut buffer, decode)
        .map_err(|error| format!("cannot be read: {error}"))?
}

/// Reads the data of an extent. If a block doesn't match its checksum, the other copies are
/// tried.
pub(crate) fn read_data(
    device: &dyn BlockDevice,
    range: BlockRange,
    checksums: &[u32],
) -> Result<AlignedBuffer, DeviceError> {
    let mut data = AlignedBuffer::zeroed(range.blocks as usize * BLOCK_SIZE);
    let read = device.read(range.start.offset_bytes(), &mut data);
    if device.copies() == 1 {
        return read.map(|()| data);
    }
    for (block, (bytes, sum)) in
        (range.start.0..).zip(data.chunks_exact_mut(BLOCK_SIZE).zip(checksums))
    {
        if read.is_err() || checksum(bytes) != *sum {
            let verify = |bytes: &[u8]| if checksum(bytes) == *sum { Ok(()) } else { Err(()) };
            // The caller compares the checksums and reports blocks that are bad in all copies.
            let _ = read_verified(device, BlockNumber(block).offset_bytes(), bytes, verify)?;
        }
    }
    Ok(data)
}

/// Writes one structure; `bytes` are whole blocks.
pub(crate) fn write_block(
    device: &dyn BlockDevice,
    address: BlockNumber,
    bytes: &[u8],
) -> Result<(), DeviceError> {
    device.write(address.offset_bytes(), &[&AlignedBuffer::copy_of(bytes)])
}

impl Reader<'_> {
    /// Number of the volume's blocks that the device really has.
    pub(crate) fn blocks_present(&self) -> u64 {
        self.geometry.total_blocks.min(self.device.length_bytes() / BLOCK_SIZE as u64)
    }

    /// Whether `range` can be allocated and lies on the device.
    pub(crate) fn contains(&self, range: BlockRange) -> bool {
        self.geometry.contains(range) && range.end().0 <= self.blocks_present()
    }

    /// The nodes at `addresses` (which [`Reader::has_node`] accepted), each one or its problem in
    /// words.
    pub(crate) fn nodes(&self, addresses: &[BlockNumber]) -> Vec<Result<Node, String>> {
        let mut nodes = Vec::with_capacity(addresses.len());
        let mut rest = addresses;
        while let Some(&first) = rest.first() {
            let run = rest
                .iter()
                .enumerate()
                .take_while(|(index, address)| address.0 == first.0 + *index as u64 * NODE_BLOCKS)
                .count();
            let (now, later) = rest.split_at(run);
            match read_blocks(self.device, BlockRange::new(first, run as u64 * NODE_BLOCKS)) {
                Ok(pages) => {
                    nodes.extend(now.iter().zip(pages.chunks_exact(NODE_SIZE)).map(|(&a, page)| {
                        self.decode(page, a).or_else(|problem| self.other_copy(a, problem))
                    }))
                }
                Err(_) => nodes.extend(now.iter().map(|&address| self.node(address))),
            }
            rest = later;
        }
        nodes
    }

    fn other_copy(&self, address: BlockNumber, problem: String) -> Result<Node, String> {
        if self.device.copies() == 1 { Err(problem) } else { self.node(address) }
    }

    /// Whether a node can be at `address`. A pointer may lead anywhere.
    pub(crate) fn has_node(&self, address: BlockNumber) -> bool {
        address.0.is_multiple_of(NODE_BLOCKS) && self.contains(BlockRange::node(address))
    }

    /// The node at `address`, or its problem in words. Any address will do.
    pub(crate) fn node(&self, address: BlockNumber) -> Result<Node, String> {
        if !self.has_node(address) {
            return Err(OUTSIDE.into());
        }
        read_decoded(self.device, BlockRange::node(address), |page| self.decode(page, address))
    }

    fn decode(&self, page: &[u8], address: BlockNumber) -> Result<Node, String> {
        let page = page.to_vec().into_boxed_slice().try_into().expect("a node's size was read");
        Node::decode(page, self.volume, address).map_err(|error| error.problem)
    }
}
