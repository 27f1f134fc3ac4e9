//! A lie of either reader is noticed.
use super::*;
use crate::files::format;
use cairn_blockdev::SimulatedDevice;
use cairn_engine::{
    AllocateMode, AttributeChange, FsyncKind, NewInode, RenameMode, VolumeOptions, XattrMode,
};
use std::sync::Arc;

fn open(device: &Arc<SimulatedDevice>, read_only: bool) -> Volume {
    let options = VolumeOptions { background: false, read_only, ..VolumeOptions::default() };
    Volume::open(device.clone() as Arc<dyn BlockDevice>, options).expect("it opens")
}

fn new(file_type: FileType, target: Option<&[u8]>) -> NewInode<'_> {
    NewInode { file_type, mode: 0o644, uid: 3, gid: 4, device: 0, target }
}

/// A volume with something of everything: a part in its trees, a part in its log only.
fn volume() -> Arc<SimulatedDevice> {
    let device = Arc::new(SimulatedDevice::new(32 << 20));
    format(&*device, 1 << 20).expect("a new volume");
    let volume = open(&device, false);
    let root = volume.root();
    let fill = || -> Result<(), Error> {
        let directory = volume.create(root, b"d", &new(FileType::Directory, None))?.inode;
        let file = volume.create(directory, b"file", &new(FileType::Regular, None))?.inode;
        volume.write(file, 0, &[1; 9000])?;
        volume.write(file, 100_000, &[2; 70_000])?;
        volume.set_xattr(file, b"user.long", &[7; 9000], XattrMode::Any)?;
        volume.create(root, b"link", &new(FileType::Symlink, Some(b"d/file")))?;
        volume.create(root, b"pipe", &new(FileType::Fifo, None))?;
        volume.commit()?;
        volume.link(file, root, b"again")?;
        volume.write(file, 4096, &[3; 5000])?;
        volume.allocate(file, 120_000, 20_000, AllocateMode::PunchHole)?;
        volume.set_xattr(file, b"user.short", b"value", XattrMode::Any)?;
        volume.rename(root, b"pipe", directory, b"moved", RenameMode::Replace)?;
        volume.fsync_blocking(file, FsyncKind::Full)
    };
    fill().expect("space");
    let device = Arc::new(device.snapshot());
    // The log stays: the power fails now.
    drop(volume);
    device
}

fn file_of(view: &View<'_>) -> ObjectId {
    *view.names.iter().find(|((_, name), _)| name == b"again").expect("it has two names").1
}

#[test]
fn both_readers_see_the_same() {
    let device = volume();
    let engine = open(&device, true);
    let found = Found::read(&engine).expect("it is whole");
    compare(&*device, &engine, &found).unwrap_or_else(|error| panic!("{error}"));
    compare_all(&*device, &engine).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(read_all(&*device), Ok(Vec::new()));
    let view = View::of_second_reader(&*device).expect("it is whole");
    let Some(Ok(data)) = &view.objects[&file_of(&view)].data else { panic!("no data") };
    assert!(data.len() == 3 && view.names.len() == 5, "{data:?}");
}

#[test]
fn each_lie_of_either_reader_is_noticed() {
    type Lie = (&'static str, fn(&mut View<'_>));
    fn lie<'s>(view: &'s mut View<'_>) -> &'s mut Attributes {
        let file = file_of(view);
        &mut view.objects.get_mut(&file).expect("it exists").attributes
    }
    fn file<'s, 'v>(view: &'s mut View<'v>) -> &'s mut Seen<'v> {
        let file = file_of(view);
        view.objects.get_mut(&file).expect("it exists")
    }
    fn data<'s, 'v>(view: &'s mut View<'v>) -> &'s mut Data<'v> {
        file(view).data.as_mut().expect("a file").as_mut().expect("whole")
    }
    let lies: [Lie; 20] = [
        ("the name \"again\"", |view| {
            let root = ObjectId::ROOT;
            view.names.remove(&(root, b"again".to_vec()));
        }),
        ("the name \"link\"", |view| {
            let file = file_of(view);
            view.names.insert((ObjectId::ROOT, b"link".to_vec()), file);
        }),
        ("the name \"more\"", |view| {
            let file = file_of(view);
            view.names.insert((ObjectId::ROOT, b"more".to_vec()), file);
        }),
        ("the existence", |view| {
            let file = file_of(view);
            view.objects.remove(&file);
        }),
        ("the attributes", |view| lie(view).mode ^= 1),
        ("the attributes", |view| lie(view).uid += 1),
        ("the attributes", |view| lie(view).gid += 1),
        ("the attributes", |view| lie(view).links += 1),
        ("the attributes", |view| lie(view).size_bytes += 1),
        ("the attributes", |view| lie(view).blocks_512 += 8),
        ("the attributes", |view| lie(view).device += 1),
        ("the attributes", |view| lie(view).file_type = FileType::Socket),
        ("the attributes", |view| lie(view).modified.nanoseconds ^= 1),
        ("the attributes", |view| lie(view).accessed.nanoseconds ^= 1),
        ("the attributes", |view| lie(view).changed.seconds += 1),
        ("the attributes", |view| lie(view).created.seconds += 1),
        ("the extended attributes", |view| file(view).xattrs[0].2 ^= 1),
        ("the data", |view| data(view)[1].1.to_mut()[77] ^= 1),
        ("the ranges of data", |view| data(view)[0].1.to_mut().push(0)),
        ("the data", |view| file(view).data = Some(Err("damaged".into()))),
    ];
    let device = volume();
    let engine = open(&device, true);
    let found = Found::read(&engine).expect("it is whole");
    let first = View::of_found(&engine, &found).expect("it is whole");
    let second = View::of_second_reader(&*device).expect("it is whole");
    assert_eq!(difference(&first, &second), Ok(()));
    for (what, change) in lies {
        for of_engine in [true, false] {
            let (mut first, mut second) = (first.clone(), second.clone());
            change(if of_engine { &mut first } else { &mut second });
            let told = difference(&first, &second).expect_err(what);
            assert!(told.contains(&format!("differ in {what} of ")), "{what}: {told}");
        }
    }
    let mut target = second.clone();
    let link = target.objects.values_mut().find(|seen| seen.target.is_some()).expect("a link");
    link.target = Some(b"d/fila".to_vec());
    let told = difference(&first, &target).expect_err("another target");
    assert!(told.contains("the target of /link"), "{told}");
}

#[test]
fn a_hole_that_reads_as_data_is_noticed() {
    let device = volume();
    let engine = open(&device, true);
    let mut found = Found::read(&engine).expect("it is whole");
    let file = InodeId(file_of(&View::of_second_reader(&*device).expect("it is whole")).inode.0);
    let object = found.objects.get_mut(&file).expect("it exists");
    object.bytes.as_mut().expect("a file").as_mut().expect("whole")[50_000] = 9;
    let told = compare(&*device, &engine, &found).expect_err("a hole holds a byte");
    assert!(told.contains("/again") && told.contains("50000"), "{told}");
}

/// As if a reader left out the newest checkpoint, or read a block of another time.
#[test]
fn another_state_of_the_device_is_noticed() {
    let device = volume();
    let engine = open(&device, true);
    let found = Found::read(&engine).expect("it is whole");
    let later = Arc::new(device.snapshot());
    let changed = open(&later, false);
    let file = InodeId(file_of(&View::of_second_reader(&*device).expect("it is whole")).inode.0);
    let change = AttributeChange { mode: Some(0o600), ..AttributeChange::default() };
    changed.set_attributes(file, &change).expect("it exists");
    changed.close().expect("it closes");
    let told = compare(&*later, &engine, &found).expect_err("another mode");
    assert!(told.contains("the attributes of "), "{told}");
    let told = compare_all(&*device, &open(&later, true)).expect_err("another mode");
    assert!(told.contains("the attributes of "), "{told}");
}
