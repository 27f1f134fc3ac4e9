//! The order of node locks: the debug build catches an inversion, even when there is no other
//! thread to wait for.
#![cfg(debug_assertions)]
use crate::handle::NodeHandle;
use crate::node_lock::{Class, NodeLocks};
use crate::statistics::LockWaits;
use crate::test_support::VOLUME;
use cairn_format::{BlockNumber, Generation, Node, TREE_FILES};
use std::panic::{AssertUnwindSafe, catch_unwind};

fn node(level: u8, block: u64) -> NodeHandle {
    let node = Node::new(VOLUME, TREE_FILES, level, BlockNumber(block), Generation(7));
    NodeHandle::new(node, &NodeLocks::new())
}

fn is_refused(lock: impl FnOnce()) -> bool {
    let Err(payload) = catch_unwind(AssertUnwindSafe(lock)) else { return false };
    payload
        .downcast_ref::<String>()
        .is_some_and(|message| message.starts_with("lock order: \"node\" at place"))
}

#[test]
fn a_descent_goes_down_and_from_left_to_right() {
    let waits = LockWaits::default();
    let parent = node(1, 400).write(Class::First, &waits);
    let left = node(0, 404).write(Class::First, &waits);
    let right = node(0, 408).write(Class::Right, &waits);
    // Copies of both, made while both are locked.
    let copies = (node(0, 412).write_new(), node(0, 416).write_new());
    drop((parent, left, right, copies));
    let (above, child) = (node(2, 420).read(&waits), node(1, 424).read(&waits));
    drop((above, child));
}

#[test]
fn an_inversion_is_caught() {
    let waits = LockWaits::default();
    let right = node(0, 408).write(Class::Right, &waits);
    assert!(
        is_refused(|| drop(node(0, 404).write(Class::First, &waits))),
        "the left sibling after the right one"
    );
    drop(right);
    let child = node(0, 404).read(&waits);
    assert!(is_refused(|| drop(node(1, 400).read(&waits))), "the parent after the child");
    assert!(is_refused(|| drop(node(0, 408).read(&waits))), "two of one level without a side");
    drop(child);
    let copy = node(0, 412).write_new();
    assert!(
        is_refused(|| drop(node(0, 408).write(Class::Right, &waits))),
        "an old node after a new one of its level"
    );
    drop(copy);
}
