//! Reads through the cache of clean data, beside a copy of the files: on a device so small that
//! freed blocks are soon used again.
use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_engine::{
    AllocateMode, AttributeChange, Error, FileType, FsyncKind, InodeId, NewInode, Volume,
    VolumeOptions, mkfs,
};
use cairn_environment::random::Seeded;
use std::sync::Arc;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 7, gid: 8, device: 0, target: None };
const BLOCK: u64 = 4096;

fn device(mebibytes: u64) -> Arc<MemoryDevice> {
    let device = Arc::new(MemoryDevice::new(mebibytes << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    device
}

fn options(data_cache_bytes: u64) -> VolumeOptions {
    VolumeOptions { background: false, data_cache_bytes, ..VolumeOptions::default() }
}

fn open(device: &Arc<MemoryDevice>, data_cache_bytes: u64) -> Volume {
    Volume::open(device.clone() as Arc<dyn BlockDevice>, options(data_cache_bytes)).unwrap()
}

fn bytes(random: &mut Seeded, length: usize) -> Vec<u8> {
    let fill = random.next_u64();
    // A multiple of nothing, so that equal blocks are rare.
    (0..length as u64)
        .map(|index| (fill.wrapping_add(index / 5).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

struct Subject {
    volume: Volume,
    files: Vec<(InodeId, Vec<u8>)>,
    created: u32,
}

impl Subject {
    fn step(&mut self, random: &mut Seeded) {
        if self.files.len() < 3 || (self.files.len() < 40 && random.chance(1, 6)) {
            self.created += 1;
            let name = format!("file {}", self.created);
            self.files.push((
                self.volume.create(self.volume.root(), name.as_bytes(), &FILE).unwrap().inode,
                Vec::new(),
            ));
        }
        let index = random.below(self.files.len() as u64) as usize;
        let (file, model) = &mut self.files[index];
        let (file, volume) = (*file, &self.volume);
        match random.below(20) {
            0..9 => {
                let length =
                    [1, 100, 4096, 5000, 20_000, 60_000, 300_000][random.below(7) as usize];
                let offset = random.below(model.len() as u64 + 6000) as usize
                    & if random.chance(1, 2) { !4095 } else { !0 };
                let data = bytes(random, length);
                match volume.write(file, offset as u64, &data) {
                    Ok(()) => {
                        model.resize(model.len().max(offset + length), 0);
                        model[offset..offset + length].copy_from_slice(&data);
                    }
                    // What was stored of it is not said: the file goes.
                    Err(Error::NoSpace) => self.remove(index),
                    Err(error) => panic!("{error}"),
                }
            }
            9 => {
                let size = random.below(model.len() as u64 + 5000);
                model.resize(size as usize, 0);
                volume
                    .set_attributes(
                        file,
                        &AttributeChange { size: Some(size), ..AttributeChange::default() },
                    )
                    .unwrap();
            }
            10 => {
                let (from, length) =
                    (random.below(model.len() as u64 + 1), 1 + random.below(30_000));
                volume.allocate(file, from, length, AllocateMode::PunchHole).unwrap();
                let end = model.len().min((from + length) as usize);
                model[from as usize..end].fill(0);
            }
            11 => self.remove(index),
            12..14 => volume.fsync_blocking(file, FsyncKind::Full).unwrap(),
            14 => volume.sync().unwrap(),
            15 => volume.commit().unwrap(),
            _ => self.compare(index, random),
        }
    }

    fn remove(&mut self, index: usize) {
        let (file, _) = self.files.swap_remove(index);
        let mut name = Vec::new();
        let find = &mut |item: cairn_engine::DirectoryItem<'_>| {
            if item.inode == file {
                name = item.name.to_vec();
            }
            true
        };
        self.volume.read_directory(self.volume.root(), 0, find).unwrap();
        self.volume.unlink(self.volume.root(), &name).unwrap();
        self.volume.forget(file, 1);
    }

    fn compare(&self, index: usize, random: &mut Seeded) {
        let (file, model) = &self.files[index];
        let offset = random.below(model.len() as u64 + 1) as usize;
        let length = [100, 4096, 40_000, 1 << 20][random.below(4) as usize];
        let expected = &model[offset..model.len().min(offset + length)];
        let mut found = Vec::new();
        self.volume.read(*file, offset as u64, length, &mut found).unwrap();
        assert!(found == expected, "inode {file} from {offset}");
        let mut buffer = vec![0xee; length];
        if let Some(count) = self.volume.read_cached_into(*file, offset as u64, &mut buffer) {
            assert!(buffer[..count] == *expected, "inode {file} from {offset}, in memory");
        }
    }

    fn compare_all(&self) {
        for (file, model) in &self.files {
            let mut found = Vec::new();
            self.volume.read(*file, 0, model.len() + 1, &mut found).unwrap();
            assert!(found == *model, "inode {file}");
        }
    }
}

#[test]
fn reads_are_the_same_with_any_cache() {
    for data_cache_bytes in [0, BLOCK, 16 * BLOCK, 200 * BLOCK, 64 << 20] {
        for seed in 0..4 {
            let (device, random) = (device(32), &mut Seeded::new(seed));
            let volume = open(&device, data_cache_bytes);
            let mut subject = Subject { volume, files: Vec::new(), created: 0 };
            for _ in 0..1500 {
                subject.step(random);
                let held = subject.volume.statistics().data_cache_bytes;
                assert!(held <= data_cache_bytes, "{held} bytes of {data_cache_bytes}");
            }
            subject.compare_all();
            let statistics = subject.volume.statistics();
            assert_eq!(
                statistics.data_cache_hits > 0,
                data_cache_bytes > 0,
                "{data_cache_bytes} bytes, seed {seed}"
            );
            subject.volume.close().unwrap();
            subject.volume = open(&device, 0);
            subject.compare_all();
        }
    }
}

/// As tar writes: in pieces that are no whole blocks.
fn write_in_pieces(volume: &Volume, file: InodeId, content: &[u8]) {
    for (index, piece) in content.chunks(9728).enumerate() {
        volume.write(file, index as u64 * 9728, piece).unwrap();
    }
}

#[test]
fn a_small_file_is_read_from_memory_after_it_was_written_out() {
    let volume = open(&device(64), 1 << 20);
    let content = bytes(&mut Seeded::new(1), 50_000);
    for way in 0..3 {
        let file =
            volume.create(volume.root(), format!("file {way}").as_bytes(), &FILE).unwrap().inode;
        write_in_pieces(&volume, file, &content);
        match way {
            0 => volume.sync().unwrap(),
            1 => volume.fsync_blocking(file, FsyncKind::Full).unwrap(),
            _ => {}
        }
        let mut buffer = vec![0; 60_000];
        assert_eq!(volume.read_cached_into(file, 0, &mut buffer), Some(content.len()));
        assert!(buffer[..content.len()] == content);
        assert_eq!(volume.read_cached_into(file, 49_999, &mut buffer), Some(1));
        assert_eq!(volume.read_cached_into(file, 50_000, &mut buffer), Some(0));
        let copy =
            volume.create(volume.root(), format!("copy {way}").as_bytes(), &FILE).unwrap().inode;
        assert_eq!(volume.copy_range(file, 0, copy, 0, 50_000).unwrap(), 50_000);
    }
    let statistics = volume.statistics();
    assert!(
        statistics.data_cache_hits >= 26 && statistics.data_cache_misses == 0,
        "{statistics:?}"
    );
}

#[test]
fn what_is_not_in_memory_is_left_to_a_read_that_may_wait() {
    let device = device(64);
    let (small, large) = (bytes(&mut Seeded::new(2), 30_000), bytes(&mut Seeded::new(3), 1 << 20));
    let volume = open(&device, 1 << 20);
    let files: Vec<_> = [&small, &large]
        .into_iter()
        .map(|content| {
            let file = volume
                .create(volume.root(), content.len().to_string().as_bytes(), &FILE)
                .unwrap()
                .inode;
            volume.write(file, 0, content).unwrap();
            file
        })
        .collect();
    volume.close().unwrap();
    let volume = open(&device, 1 << 20);
    let mut buffer = vec![0; 1 << 20];
    // Not even the inode is.
    assert_eq!(volume.read_cached_into(files[0], 0, &mut buffer), None);
    assert_eq!(volume.read_into(files[0], 0, &mut buffer).unwrap(), small.len());
    assert_eq!(volume.read_cached_into(files[0], 0, &mut buffer), Some(small.len()));
    assert!(buffer[..small.len()] == small);
    // A large transfer leaves nothing, and drives nothing out.
    assert_eq!(volume.read_into(files[1], 0, &mut buffer).unwrap(), large.len());
    assert_eq!(volume.read_cached_into(files[1], 0, &mut buffer), None);
    assert_eq!(volume.statistics().data_cache_bytes, 8 * BLOCK);
    volume.write(files[1], 0, &large).unwrap();
    volume.sync().unwrap();
    assert_eq!(volume.read_cached_into(files[1], 0, &mut buffer[..4096]), None);
    // But a block of it that was changed in part stays.
    volume.write(files[1], 5 * BLOCK + 7, b"changed").unwrap();
    volume.sync().unwrap();
    assert_eq!(volume.read_cached_into(files[1], 5 * BLOCK, &mut buffer[..14]), Some(14));
    assert_eq!(buffer[7..14], *b"changed");
    // A hole needs no device either, and what is no file cannot be read.
    volume
        .set_attributes(
            files[0],
            &AttributeChange { size: Some(1 << 20), ..AttributeChange::default() },
        )
        .unwrap();
    assert_eq!(volume.read_cached_into(files[0], 40_000, &mut buffer[..4096]), Some(4096));
    assert_eq!(buffer[..4096], [0; 4096]);
    assert_eq!(volume.read_cached_into(volume.root(), 0, &mut buffer), None);
}
