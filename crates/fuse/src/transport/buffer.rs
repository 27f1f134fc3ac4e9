//! The memory that requests are read into.
//!
//! The kernel fills a list of pieces: the head, which ends where the data of a WRITE begins, and
//! buffers of whole blocks for the rest. So the data of a WRITE lies in aligned memory of the
//! volume's pool. Much data is passed on by reference, and other buffers from the pool replace the
//! used ones. Little data is copied by its user, since a reference would keep a large buffer alive.
//! Any other request is short; it is joined into one piece to be parsed.
use super::TRANSFER_BYTES_MAX;
use crate::protocol::wire::{InHeader, WriteIn, opcode};
use crate::protocol::{self, MalformedRequest, Request, WriteData};
use cairn_blockdev::{BlockBuffer, BlockPool, SharedBlocks};
use std::fmt;
use std::io::IoSliceMut;
use zerocopy::FromBytes;

/// Bytes before the data of a WRITE.
const HEAD_BYTES: usize = size_of::<InHeader>() + size_of::<WriteIn>();
/// Lengths of the buffers. The first has room for most requests; together they have room for
/// [`TRANSFER_BYTES_MAX`], and the last one for what a later kernel may append.
const BODY_BYTES: [usize; 6] = [64 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 4 << 10];
/// From this length on the data of a WRITE is passed on by reference: it keeps at most twice its
/// length in memory.
const SHARED_BYTES_MIN: usize = BODY_BYTES[0] / 2;
const _: () = assert!(
    BODY_BYTES[0] + BODY_BYTES[1] + BODY_BYTES[2] + BODY_BYTES[3] + BODY_BYTES[4]
        == TRANSFER_BYTES_MAX
);

/// Memory for one request after the other.
pub struct RequestBuffer {
    head: [u8; HEAD_BYTES],
    body: [BlockBuffer; BODY_BYTES.len()],
    /// Data of the current request that is passed on.
    shared: Vec<SharedBlocks>,
    /// The current request, if it is longer than its head and no WRITE.
    joined: Vec<u8>,
    pool: BlockPool,
}

impl RequestBuffer {
    /// Memory for the longest request, from `pool`.
    pub fn new(pool: &BlockPool) -> Self {
        let body = BODY_BYTES.map(|length_bytes| pool.take(length_bytes));
        Self {
            head: [0; HEAD_BYTES],
            body,
            shared: Vec::with_capacity(BODY_BYTES.len()),
            joined: Vec::new(),
            pool: pool.clone(),
        }
    }

    /// The whole room for a request, in consecutive pieces.
    pub fn room(&mut self) -> [IoSliceMut<'_>; 1 + BODY_BYTES.len()] {
        let [a, b, c, d, e, f] = &mut self.body;
        [&mut self.head[..], a, b, c, d, e, f].map(IoSliceMut::new)
    }

    /// Drops the references to the last request's data.
    pub fn release(&mut self) {
        self.shared.clear();
    }

    /// Parses the request of `length_bytes` that was read into the room.
    ///
    /// # Errors
    /// If the bytes are no request.
    pub fn parse(&mut self, length_bytes: usize) -> Result<Request<'_>, MalformedRequest> {
        if length_bytes <= HEAD_BYTES {
            return protocol::parse(&self.head[..length_bytes]);
        }
        match InHeader::read_from_prefix(&self.head) {
            Ok((header, _)) if header.opcode == opcode::WRITE => {
                self.parse_write(&header, length_bytes)
            }
            _ => {
                self.join(length_bytes);
                protocol::parse(&self.joined)
            }
        }
    }

    fn parse_write(
        &mut self,
        header: &InHeader,
        length_bytes: usize,
    ) -> Result<Request<'_>, MalformedRequest> {
        let body_bytes = length_bytes - HEAD_BYTES;
        let structure = &self.head[size_of::<InHeader>()..];
        let data_bytes = WriteIn::read_from_bytes(structure).map_or(0, |write| write.size as usize);
        protocol::check_length(header, length_bytes)?;
        if data_bytes > body_bytes || data_bytes < SHARED_BYTES_MIN {
            let data = &self.body[0][..body_bytes.min(BODY_BYTES[0])];
            return protocol::parse_parts(header, structure, data);
        }
        self.shared.clear();
        let mut at = 0;
        for (index, length_bytes) in BODY_BYTES.into_iter().enumerate() {
            if at < data_bytes {
                let filled = std::mem::replace(&mut self.body[index], self.pool.take(length_bytes));
                self.shared.push(filled.share());
            }
            at += length_bytes;
        }
        protocol::parse_write(
            header,
            structure,
            WriteData::Shared { parts: &self.shared, length_bytes: data_bytes },
        )
    }

    fn join(&mut self, length_bytes: usize) {
        self.joined.clear();
        self.joined.extend_from_slice(&self.head);
        for part in &self.body {
            let missing = length_bytes - self.joined.len();
            self.joined.extend_from_slice(&part[..missing.min(part.len())]);
        }
    }
}

impl fmt::Debug for RequestBuffer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("RequestBuffer")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Operation;
    use zerocopy::IntoBytes;

    /// Fills a request into the room as the kernel does.
    fn fill(buffer: &mut RequestBuffer, request: &[u8]) -> usize {
        let mut rest = request;
        for mut part in buffer.room() {
            let (here, later) = rest.split_at(rest.len().min(part.len()));
            part[..here.len()].copy_from_slice(here);
            rest = later;
        }
        assert!(rest.is_empty());
        request.len()
    }

    fn request(number: u32, structure: &[u8], rest: &[u8]) -> Vec<u8> {
        let length = (size_of::<InHeader>() + structure.len() + rest.len()) as u32;
        let header = InHeader { length, opcode: number, unique: 7, node: 1, ..InHeader::default() };
        [header.as_bytes(), structure, rest].concat()
    }

    fn write(data: &[u8]) -> Vec<u8> {
        let structure = WriteIn { offset: 4096, size: data.len() as u32, ..WriteIn::default() };
        request(opcode::WRITE, structure.as_bytes(), data)
    }

    #[test]
    fn data_of_writes_arrives_in_blocks_however_long_it_is() {
        let pool = BlockPool::new(4 << 20);
        let mut buffer = RequestBuffer::new(&pool);
        let mut kept: Vec<(Vec<SharedBlocks>, Vec<u8>)> = Vec::new();
        for (fill_byte, length_bytes) in [
            1,
            4096,
            SHARED_BYTES_MIN - 1,
            SHARED_BYTES_MIN,
            64 << 10,
            (64 << 10) + 1,
            300_000,
            TRANSFER_BYTES_MAX,
        ]
        .into_iter()
        .enumerate()
        {
            let data: Vec<u8> = (0..length_bytes).map(|at| (at / 999 + fill_byte) as u8).collect();
            let length = fill(&mut buffer, &write(&data));
            let Operation::Write { offset_bytes: 4096, data: arrived, .. } =
                buffer.parse(length).unwrap().operation
            else {
                panic!()
            };
            match arrived {
                WriteData::Bytes(bytes) => {
                    assert!(length_bytes < SHARED_BYTES_MIN && bytes == data)
                }
                WriteData::Shared { parts, length_bytes: given } => {
                    assert!(length_bytes >= SHARED_BYTES_MIN && given == length_bytes);
                    kept.push((parts.to_vec(), data));
                }
            }
        }
        // Later requests have not changed the kept data.
        for (parts, data) in kept {
            assert!(parts.iter().flat_map(|part| part.iter()).take(data.len()).eq(&data));
        }
    }

    #[test]
    fn other_requests_are_joined() {
        let pool = BlockPool::new(0);
        let mut buffer = RequestBuffer::new(&pool);
        for length in [1, 39, 40, 200] {
            let name = [b'n'; 200];
            let length_bytes = fill(
                &mut buffer,
                &request(opcode::LOOKUP, &[], &[&name[..length], b"\0"].concat()),
            );
            let Operation::Lookup { name: found } = buffer.parse(length_bytes).unwrap().operation
            else {
                panic!()
            };
            assert_eq!(found, &name[..length]);
        }
    }

    #[test]
    fn nonsense_is_an_error() {
        let pool = BlockPool::new(0);
        let mut buffer = RequestBuffer::new(&pool);
        for size in [0, 101, u32::MAX] {
            let structure = WriteIn { size, ..WriteIn::default() };
            let length =
                fill(&mut buffer, &request(opcode::WRITE, structure.as_bytes(), &[1; 100]));
            assert_eq!(buffer.parse(length).is_ok(), size == 0);
        }
        let mut long = write(&[1; 50_000]);
        let length = fill(&mut buffer, &long);
        assert!(buffer.parse(length - 1).is_err() && buffer.parse(20).is_err());
        long[0] ^= 1;
        let length = fill(&mut buffer, &long);
        assert_eq!(buffer.parse(length).unwrap_err().unique, 7);
    }
}
