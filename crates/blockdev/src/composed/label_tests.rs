//! Labels: the bytes of `docs/format.md`, and what damage does.

use super::label::{
    ComposedKind, DATA_START_BYTES, FillProgress, Identity, LABEL_SLOTS_BYTES, Label, MEMBERS_MAX,
    RawLabel,
};
use crate::{BlockDevice, MemoryDevice};
use std::mem::offset_of;

const DOCUMENT: &str = include_str!("../../../../docs/format.md");

fn label() -> Label {
    Label {
        kind: ComposedKind::Mirror,
        progress: FillProgress::Complete,
        index: 1,
        pool: Identity([1; 16]),
        member: Identity([3; 16]),
        events: 0x1122_3344_5566_7788,
        sequence: 4,
        open: true,
        in_sync: 3,
        member_bytes: 1 << 24,
        composed_bytes: 1 << 25,
        rebuilt_bytes: 7 << 20,
        members: vec![Identity([2; 16]), Identity([3; 16])],
        raise: Identity([4; 16]),
    }
}

fn field_bytes<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! fields {
    ($structure:ident { $($field:ident),* }) => {{
        let _ = |$structure { $($field: _),* }: $structure| ();
        vec![$((
            offset_of!($structure, $field),
            field_bytes(|value: &$structure| &value.$field),
            stringify!($field),
        )),*]
    }};
}

#[test]
fn the_label_is_as_documented() {
    #[rustfmt::skip]
    let fields = fields!(RawLabel {
        magic, checksum, version, kind, progress, index, count, pool, member, events, sequence,
        flags, in_sync, member_bytes, composed_bytes, rebuilt_bytes, members, raise,
        reserved
    });
    let documented: Vec<(usize, usize, &str)> = DOCUMENT
        .lines()
        .filter(|line| line.starts_with("| MemberLabel |"))
        .map(|line| line.split('|').map(str::trim).collect::<Vec<_>>())
        .map(|cells| (cells[2].parse().unwrap(), cells[3].parse().unwrap(), cells[4]))
        .collect();
    assert_eq!(documented, fields);
    let mut end = 0;
    for (offset, bytes, field) in fields {
        assert_eq!(offset, end, "{field} leaves a gap");
        end = offset + bytes;
    }
    assert_eq!((end, size_of::<RawLabel>(), MEMBERS_MAX), (512, 512, 8));
    assert_eq!((LABEL_SLOTS_BYTES, DATA_START_BYTES), ([8 * 4096, 24 * 4096], 1 << 20));
    let bytes = label().encode();
    assert_eq!(
        (&bytes[..4], bytes[8], bytes[10], bytes[11], bytes[12], bytes[14]),
        (&b"CRNM"[..], 1, 1, 1, 1, 2)
    );
    assert_eq!((bytes[48], bytes[55], bytes[64], bytes[68]), (0x88, 0x11, 1, 3));
    let mut zeroed = bytes;
    zeroed[4..8].fill(0);
    assert_eq!(bytes[4..8], crc32c::crc32c(&zeroed).to_le_bytes());
}

#[test]
fn a_label_survives_its_encoding_and_no_damage_goes_unseen() {
    let bytes = label().encode();
    assert_eq!(Label::decode(&bytes), Ok(Some(label())));
    for at in 0..bytes.len() {
        let mut damaged = bytes;
        damaged[at] ^= 0x10;
        assert_eq!(Label::decode(&damaged), Ok(None), "byte {at}");
    }
    assert_eq!(Label::decode(&bytes[..100]), Ok(None));
}

#[test]
fn impossible_labels_and_newer_versions_are_not_taken() {
    let impossible = [
        Label { index: 2, ..label() },
        Label { members: Vec::new(), ..label() },
        Label { member_bytes: 5000, ..label() },
        Label { composed_bytes: 0, ..label() },
    ];
    for label in impossible {
        assert_eq!(Label::decode(&label.encode()), Ok(None), "{label:?}");
    }
    let mut newer = label().encode();
    newer[8] = 2;
    newer[4..8].fill(0);
    let checksum = crc32c::crc32c(&newer);
    newer[4..8].copy_from_slice(&checksum.to_le_bytes());
    assert_eq!(Label::decode(&newer), Err(2));
}

#[test]
fn the_newer_slot_counts_and_the_older_one_stands_in_for_it() {
    let device = MemoryDevice::new(2 << 20);
    assert_eq!(Label::read(&device, "d").unwrap(), None);
    let mut label = label();
    for events in 5..9 {
        label.events = events;
        label.write(&device).unwrap();
        assert_eq!(Label::read(&device, "d").unwrap().map(|label| label.events), Some(events));
    }
    device.write(LABEL_SLOTS_BYTES[(label.sequence % 2) as usize], &[&[1; 4096]]).unwrap();
    assert_eq!(Label::read(&device, "d").unwrap().map(|label| label.events), Some(7));
}
