use super::directory_list::ListedName;
use super::wire::{self, opcode};
use super::*;
use proptest::prelude::*;
use zerocopy::{FromBytes, Immutable, IntoBytes};

fn request(opcode: u32, body: &[&[u8]]) -> Vec<u8> {
    let body = body.concat();
    let length = (size_of::<wire::InHeader>() + body.len()) as u32;
    let header = wire::InHeader {
        length,
        opcode,
        unique: 77,
        node: 5,
        uid: 1000,
        gid: 100,
        pid: 9,
        ..Default::default()
    };
    [header.as_bytes(), &body].concat()
}

fn bytes<T: IntoBytes + Immutable>(value: &T) -> &[u8] {
    value.as_bytes()
}

#[test]
fn layout() {
    let sizes = [
        (size_of::<wire::InHeader>(), 40),
        (size_of::<wire::OutHeader>(), 16),
        (size_of::<wire::Attr>(), 88),
        (size_of::<wire::EntryOut>(), 128),
        (size_of::<wire::AttrOut>(), 104),
        (size_of::<wire::CreateOut>(), 144),
        (size_of::<wire::SetattrIn>(), 88),
        (size_of::<wire::ReadIn>(), 40),
        (size_of::<wire::WriteIn>(), 40),
        (size_of::<wire::StatfsOut>(), 80),
        (size_of::<wire::InitIn>(), 64),
        (size_of::<wire::InitOut>(), 64),
        (size_of::<wire::IoctlIn>(), 32),
        (size_of::<wire::CopyFileRangeIn>(), 56),
        (size_of::<wire::Dirent>(), 24),
        (size_of::<wire::Statx>(), 256),
        (size_of::<wire::StatxOut>(), 288),
        (std::mem::offset_of!(wire::Statx, atime), 64),
        (std::mem::offset_of!(wire::Statx, rdev_major), 128),
        (std::mem::offset_of!(wire::InitOut, max_pages), 28),
        (std::mem::offset_of!(wire::SetattrIn, mode), 68),
    ];
    for (index, (size, expected)) in sizes.into_iter().enumerate() {
        assert_eq!(size, expected, "row {index}");
    }
}

#[test]
fn header_fields_arrive() {
    let bytes = request(opcode::GETATTR, &[]);
    let parsed = parse(&bytes).unwrap();
    assert_eq!(
        parsed.header,
        RequestHeader { unique: 77, opcode: opcode::GETATTR, node: 5, uid: 1000, gid: 100, pid: 9 }
    );
    assert!(matches!(parsed.operation, Operation::GetAttributes { of_open_file: false }));
}

#[test]
fn names_and_data_are_cut_out() {
    let rename = wire::Rename2In { new_parent: 8, flags: 2, padding: 0 };
    let bytes_of_rename = request(opcode::RENAME2, &[bytes(&rename), b"old\0new\0"]);
    let Operation::Rename { old_name, new_parent, new_name, flags } =
        parse(&bytes_of_rename).unwrap().operation
    else {
        panic!()
    };
    assert_eq!((old_name, new_parent, new_name, flags), (&b"old"[..], 8, &b"new"[..], 2));

    let symlink = request(opcode::SYMLINK, &[b"name\0../target\0"]);
    let Operation::Symlink { name, target } = parse(&symlink).unwrap().operation else { panic!() };
    assert_eq!((name, target), (&b"name"[..], &b"../target"[..]));

    for (open_flags, appending) in [(1, false), (0o2001, true)] {
        let write = wire::WriteIn {
            offset: 4096,
            size: 3,
            write_flags: 4,
            flags: open_flags,
            ..Default::default()
        };
        let write = request(opcode::WRITE, &[bytes(&write), b"abcdef"]);
        let Operation::Write { offset_bytes, data, flags, appends } =
            parse(&write).unwrap().operation
        else {
            panic!()
        };
        assert!(matches!((offset_bytes, data, flags), (4096, WriteData::Bytes(b"abc"), 4)));
        assert_eq!(appends, appending);
    }

    let set = wire::SetxattrIn { size: 2, flags: 1 };
    let set = request(opcode::SETXATTR, &[bytes(&set), b"user.a\0\0v"]);
    let Operation::SetXattr { name, value, flags } = parse(&set).unwrap().operation else {
        panic!()
    };
    assert_eq!((name, value, flags), (&b"user.a"[..], &b"\0v"[..], 1));

    let make = wire::MknodIn { mode: 0o20_600, device: 0x103, umask: 0, padding: 0 };
    let make = request(opcode::MKNOD, &[bytes(&make), b"null\0"]);
    assert!(matches!(
        parse(&make).unwrap().operation,
        Operation::MakeNode { name: b"null", mode: 0o20_600, device: 0x103 }
    ));
}

#[test]
fn forgets_are_listed_and_expect_no_reply() {
    let ones = [wire::ForgetOne { node: 3, count: 1 }, wire::ForgetOne { node: 4, count: 9 }];
    let batch = request(
        opcode::BATCH_FORGET,
        &[bytes(&wire::BatchForgetIn { count: 2, padding: 0 }), bytes(&ones[0]), bytes(&ones[1])],
    );
    let operation = parse(&batch).unwrap().operation;
    assert!(!operation.expects_reply());
    let Operation::BatchForget(list) = operation else { panic!() };
    assert_eq!(list.iter().collect::<Vec<_>>(), [(3, 1), (4, 9)]);
    let too_many = request(
        opcode::BATCH_FORGET,
        &[bytes(&wire::BatchForgetIn { count: u32::MAX, padding: 0 }), bytes(&ones[0])],
    );
    assert_eq!(parse(&too_many).unwrap_err().what, "a count that overflows");
    assert!(Operation::GetAttributes { of_open_file: true }.expects_reply());
    assert!(!Operation::Interrupt { unique: 1 }.expects_reply());
}

#[test]
fn an_old_kernels_init_is_short() {
    let short = wire::InitInShort { major: 7, minor: 31, max_readahead: 5, flags: 6 };
    let short = request(opcode::INIT, &[bytes(&short)]);
    let Operation::Init(init) = parse(&short).unwrap().operation else { panic!() };
    assert_eq!(
        (init.major, init.minor, init.max_readahead, init.flags, init.flags2),
        (7, 31, 5, 6, 0)
    );
    assert!(parse(&request(opcode::INIT, &[&[0; 8]])).is_err());
}

#[test]
fn both_lengths_of_copies_are_distinguished() {
    let copy = wire::CopyFileRangeIn {
        offset_in: 1,
        node_out: 2,
        offset_out: 3,
        length: 1 << 40,
        ..Default::default()
    };
    for (number, expected) in [(opcode::COPY_FILE_RANGE, false), (opcode::COPY_FILE_RANGE_64, true)]
    {
        let copy = request(number, &[bytes(&copy)]);
        let Operation::CopyFileRange { to_node: 2, length_bytes, wide, .. } =
            parse(&copy).unwrap().operation
        else {
            panic!()
        };
        assert_eq!((length_bytes, wide), (1 << 40, expected));
    }
}

#[test]
fn malformed_requests_are_errors_with_their_number() {
    assert_eq!(parse(&[1, 2, 3]).unwrap_err().unique, 0);
    let mut wrong_length = request(opcode::GETATTR, &[]);
    wrong_length.push(0);
    assert_eq!(
        parse(&wrong_length).unwrap_err(),
        MalformedRequest {
            unique: 77,
            opcode: opcode::GETATTR,
            what: "length in the header is not the length read"
        }
    );
    assert_eq!(
        parse(&request(opcode::LOOKUP, &[b"no end"])).unwrap_err().what,
        "a name without its end"
    );
    assert_eq!(
        parse(&request(opcode::WRITE, &[b"short"])).unwrap_err().what,
        "shorter than its structure"
    );
    let write = wire::WriteIn { size: 100, ..Default::default() };
    assert_eq!(
        parse(&request(opcode::WRITE, &[bytes(&write), b"too little"])).unwrap_err().what,
        "shorter than its data"
    );
    assert!(matches!(
        parse(&request(9999, &[])).unwrap().operation,
        Operation::Unknown { opcode: 9999 }
    ));
}

#[test]
fn extensions_are_no_part_of_a_request() {
    let mut lookup = request(opcode::LOOKUP, &[b"name\0\0\0\0", &[0xff; 8]]);
    lookup[36..38].copy_from_slice(&1_u16.to_ne_bytes());
    assert!(matches!(parse(&lookup).unwrap().operation, Operation::Lookup { name: b"name" }));
    lookup[36..38].copy_from_slice(&u16::MAX.to_ne_bytes());
    assert_eq!(parse(&lookup).unwrap_err().what, "a name without its end");
}

#[test]
fn a_request_in_parts_is_the_same_request() {
    let header = |opcode| wire::InHeader { opcode, unique: 77, node: 5, ..Default::default() };
    let write = wire::WriteIn { offset: 4096, size: 3, ..Default::default() };
    let write = parse_parts(&header(opcode::WRITE), bytes(&write), b"abc").unwrap();
    assert!(matches!(
        write.operation,
        Operation::Write { offset_bytes: 4096, data: WriteData::Bytes(b"abc"), .. }
    ));
    let rename = wire::Rename2In { new_parent: 8, flags: 2, padding: 0 };
    let rename = parse_parts(&header(opcode::RENAME2), bytes(&rename), b"old\0new\0").unwrap();
    assert!(matches!(
        rename.operation,
        Operation::Rename { old_name: b"old", new_parent: 8, new_name: b"new", flags: 2 }
    ));
    let lookup = parse_parts(&header(opcode::LOOKUP), &[], b"name\0").unwrap();
    assert!(matches!(
        (lookup.header.node, lookup.operation),
        (5, Operation::Lookup { name: b"name" })
    ));
    assert_eq!(
        parse_parts(&header(opcode::WRITE), &[0; 5], b"data").unwrap_err().what,
        "shorter than its structure"
    );
}

#[test]
fn a_listing_ends_where_the_room_ends() {
    let name = |name, cookie| ListedName { name, inode: 9, file_type: 8, cookie };
    let mut list = DirectoryList::new(32 + 40);
    assert!(list.push(&name(b"eight888", 3)));
    assert!(list.push(&name(b"sixteen-16-bytes", 4)));
    assert!(!list.push(&name(b"", 5)));
    let bytes = list.into_bytes();
    assert_eq!(bytes.len(), 72);
    let (head, rest) = wire::Dirent::read_from_prefix(&bytes).unwrap();
    assert_eq!(
        (head.inode, head.offset, head.name_length, head.file_type, &rest[..8]),
        (9, 3, 8, 8, &b"eight888"[..])
    );

    let mut list = DirectoryPlusList::new(2 * (128 + 32));
    let entry = wire::EntryOut { node: 42, ..Default::default() };
    assert!(list.push(&name(b".", 1), &wire::EntryOut::default()));
    assert!(list.push(&name(b"a", 3), &entry));
    assert!(!list.push(&name(b"b", 4), &entry));
    assert_eq!((list.as_bytes().len(), list.nodes()), (320, &[42][..]));
}

proptest! {
    #[test]
    fn no_bytes_make_the_parser_panic(
        opcode in 0_u32..56,
        body in prop::collection::vec(any::<u8>(), 0..200),
        extension in 0_u16..40,
    ) {
        let mut bytes = request(opcode, &[&body]);
        bytes[36..38].copy_from_slice(&extension.to_ne_bytes());
        if let Ok(request) = parse(&bytes) {
            prop_assert_eq!(request.header.unique, 77);
            if let Operation::BatchForget(list) = request.operation {
                prop_assert!(list.iter().count() * 16 <= body.len());
            }
        }
    }
}
