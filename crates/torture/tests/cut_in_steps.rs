//! Files in many pieces are cut, which takes many steps, while the same program goes on: as soon as
//! it sees the new length it writes behind that, and reads the file in every way a mount reads,
//! planned reads among them. The volume has far less memory than its trees need, so it commits
//! between the steps.
//!
//! Required: what a program has seen of an operation is done. Each read returns what the model
//! says: the cut, and then what was written behind it. In the end all is the same after a remount,
//! and fsck finds nothing. `CAIRN_SEED` repeats the choices.
use cairn_blockdev::{AlignedBuffer, BlockDevice, Operation, SimulatedDevice};
use cairn_engine::{
    AllocateMode, AttributeChange, Error, FsyncKind, InodeId, ReadAtOnce, Volume, VolumeOptions,
};
use cairn_environment::random::Seeded;
use cairn_environment::thread;
use cairn_format::NODE_SIZE;
use cairn_torture::contents::{Contents, Tag, describe, pattern};
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{create, format, read_named};
use cairn_torture::readable::ReadableDevice;
use cairn_torture::seed_from_environment;
use std::sync::Arc;
use std::time::Duration;

const BLOCK: u64 = 4096;
const VOLUME_BYTES: u64 = 128 << 20;
const FILES: usize = 4;
/// Of a file; its pieces fill several leaves.
const FILE_BLOCKS: u64 = 2400;
const NODES: u64 = 2;
const RUNS: u64 = 2;
const OPERATIONS: u32 = 45;
/// Reads after each operation.
const READS: u64 = 12;

/// What happened.
#[derive(Clone, Copy, Default, Debug)]
struct Count {
    operations: u64,
    /// Writes that ended before the cut behind whose end they are.
    beside: u64,
    planned: u64,
    at_once: u64,
    otherwise: u64,
}

struct Run {
    volume: Volume,
    random: Seeded,
    inodes: Vec<InodeId>,
    models: Vec<Contents>,
    operation: u32,
    count: Count,
}

fn open(device: Arc<dyn BlockDevice>, random: &mut Seeded) -> Volume {
    let options = VolumeOptions {
        background: false,
        node_cache_bytes: NODES * NODE_SIZE as u64,
        data_cache_bytes: [0, 256 << 10][random.below(2) as usize],
        discard: random.chance(1, 2),
        ..VolumeOptions::default()
    };
    Volume::open(device, options).expect("it opens")
}

impl Run {
    fn data(&self, offset: u64, length: u64) -> Vec<u8> {
        pattern(Tag { client: 1, operation: self.operation }, offset, length)
    }

    /// Does `operation` to a file.
    fn change(
        &mut self,
        file: usize,
        model: impl FnOnce(&mut Contents),
        operation: impl FnOnce(&Volume, InodeId) -> Result<(), Error>,
    ) {
        model(&mut self.models[file]);
        self.count.operations += 1;
        operation(&self.volume, self.inodes[file])
            .unwrap_or_else(|error| panic!("operation {}: {error}", self.operation));
    }

    /// Some whole blocks, or some bytes.
    fn write(&mut self, file: usize, offset: u64) {
        let length = (1 + self.random.below(8)) * BLOCK;
        let (offset, length) = match self.random.chance(3, 4) {
            true => (offset, length),
            false => (offset + self.random.below(BLOCK), 1 + self.random.below(length)),
        };
        let data = self.data(offset, length);
        self.change(
            file,
            |model| model.write(offset, &data),
            |volume, inode| volume.write(inode, offset, &data),
        );
    }

    /// Cuts a file on a thread of its own, and goes on when the new length is seen.
    fn cut(&mut self, file: usize) {
        let size = match (self.random.below(4), self.models[file].size_bytes()) {
            (0, _) => 0,
            (1, size) => self.random.below(size + 1),
            (_, size) => self.random.below(size / BLOCK + 1) * BLOCK,
        };
        let (volume, inode) = (self.volume.clone(), self.inodes[file]);
        let change = AttributeChange { size: Some(size), ..AttributeChange::default() };
        let cutting =
            thread::spawn("cutting", move || volume.set_attributes(inode, &change).map(drop));
        self.count.operations += 1;
        self.models[file].truncate(size);
        loop {
            let ends = cutting.is_finished();
            let seen = self.volume.attributes(inode).expect("it is there").size_bytes;
            if seen == size {
                break;
            }
            assert!(!ends, "operation {}: {seen} bytes and not {size}", self.operation);
            std::thread::yield_now();
        }
        for _ in 0..1 + self.random.below(3) {
            let offset = size.div_ceil(BLOCK) + self.random.below(FILE_BLOCKS);
            self.write(file, offset % FILE_BLOCKS * BLOCK);
            self.count.beside += u64::from(!cutting.is_finished());
            self.sweep(file);
        }
        cutting.join().expect("it does not panic").expect("it is healthy");
        self.sweep(file);
    }

    /// Reads all of a file, piece by piece.
    fn sweep(&mut self, file: usize) {
        let end = self.models[file].size_bytes();
        (0..end).step_by(3 * BLOCK as usize).for_each(|offset| self.read_at(file, offset));
    }

    fn read(&mut self, file: usize) {
        let end = self.models[file].size_bytes().div_ceil(BLOCK) + 1;
        let offset = self.random.below(end) * BLOCK;
        self.read_at(file, offset);
    }

    /// One read, of whole blocks as a kernel asks for them, in the way of a request thread.
    fn read_at(&mut self, file: usize, offset: u64) {
        let (inode, model) = (self.inodes[file], &self.models[file]);
        let wanted = (1 + self.random.below(4)) * BLOCK;
        let expected = model.read(offset, wanted);
        let mut buffer = AlignedBuffer::zeroed(wanted as usize);
        // What is not in memory at first is read otherwise, and perhaps planned then.
        for _ in 0..2 {
            let read = match self.volume.read_at_once(inode, offset, &mut buffer) {
                Some(ReadAtOnce::Done(read)) => {
                    self.count.at_once += 1;
                    Some(read)
                }
                Some(ReadAtOnce::Planned(planned)) => {
                    let part = &mut buffer[planned.bytes()];
                    let length = part.len();
                    let read =
                        rustix::io::pread(planned.file(), part, planned.device_offset_bytes());
                    assert_eq!(read, Ok(length));
                    self.count.planned += 1;
                    self.volume.finish_read(&planned, &buffer)
                }
                None => None,
            };
            let read = read.unwrap_or_else(|| {
                self.count.otherwise += 1;
                self.volume.read_into(inode, offset, &mut buffer).expect("the device works")
            });
            assert!(
                buffer[..read] == expected,
                "after operation {}: file {file}, {offset}: {}, and not {}",
                self.operation,
                describe(offset, &buffer[..read]),
                describe(offset, &expected)
            );
        }
    }

    /// Many single blocks with gaps between them, so that each is a piece of its own.
    fn scatter(&mut self, file: usize) {
        let start = self.random.below(FILE_BLOCKS / 2);
        let blocks = 100 + self.random.below(FILE_BLOCKS / 2 - 100);
        let step = 2 + self.random.below(2);
        let places: Vec<u64> = (start..start + blocks).step_by(step as usize).collect();
        let bytes: Vec<Vec<u8>> =
            places.iter().map(|place| self.data(place * BLOCK, BLOCK)).collect();
        let parts = || places.iter().map(|place| place * BLOCK).zip(&bytes);
        let write = |volume: &Volume, inode| {
            parts().try_for_each(|(offset, data)| volume.write(inode, offset, data))
        };
        self.change(file, |model| parts().for_each(|(at, data)| model.write(at, data)), write);
        self.fsync(file);
    }

    fn fsync(&mut self, file: usize) {
        self.change(file, |_| (), |volume, inode| volume.fsync_blocking(inode, FsyncKind::Full));
    }

    /// One operation and the reads after it.
    fn step(&mut self) {
        let file = self.random.below(FILES as u64) as usize;
        let offset = self.random.below(FILE_BLOCKS) * BLOCK;
        match self.random.below(16) {
            0..5 => self.scatter(file),
            5..8 => self.write(file, offset),
            8..13 => self.cut(file),
            13 => {
                let length = (1 + self.random.below(FILE_BLOCKS / 4)) * BLOCK;
                self.change(
                    file,
                    |model| model.zero(offset, length),
                    |volume, inode| volume.allocate(inode, offset, length, AllocateMode::PunchHole),
                );
            }
            14 => self.fsync(file),
            _ => self.change(file, |_| (), |volume, _| volume.commit()),
        }
        (0..READS).for_each(|_| self.read(file));
    }
}

fn name_of(file: usize) -> Vec<u8> {
    format!("file {file}").into_bytes()
}

fn run(seed: u64) -> Count {
    let mut random = Seeded::new(seed);
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    format(&*device, 2 << 20).expect("a new volume");
    let readable = ReadableDevice::new(Arc::clone(&device)).expect("a file");
    let volume = open(readable, &mut random);
    device.set_delay(Operation::Flush, Duration::from_millis(2));
    let inodes: Vec<InodeId> =
        (0..FILES).map(|file| create(&volume, &name_of(file), b"").expect("a file")).collect();
    let mut run = Run {
        volume,
        random,
        inodes,
        models: vec![Contents::default(); FILES],
        operation: 0,
        count: Count::default(),
    };
    for file in 0..FILES {
        run.scatter(file);
    }
    for operation in 1..=OPERATIONS {
        run.operation = operation;
        run.step();
    }
    run.volume.sync().expect("the device works");
    run.volume.close().expect("it closes");
    expect_clean(&*device).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    let volume = open(device, &mut run.random);
    for (file, model) in run.models.iter().enumerate() {
        let found = read_named(&volume, &name_of(file)).expect("it is there");
        assert!(found == model.read(0, model.size_bytes()), "seed {seed}: file {file}, remounted");
    }
    volume.close().expect("it closes");
    run.count
}

#[test]
fn a_file_is_right_while_it_is_cut() {
    let seed = seed_from_environment();
    let mut all = Count::default();
    for seed in (0..RUNS).map(|number| seed.wrapping_add(number)) {
        eprintln!("CAIRN_SEED={seed}");
        let count = run(seed);
        eprintln!("{count:?}");
        all.operations += count.operations;
        all.beside += count.beside;
        all.planned += count.planned;
    }
    assert!(all.planned >= 20, "too little happened: {all:?}");
}
