//! Extended attributes. A value of up to 3 KiB stands in one item, a larger one goes on in further
//! parts; replacing a value is one operation whatever its size.
use crate::InodeId;
use crate::file::Files;
use crate::file::inode::InodeState;
use crate::store::operation::{Effort, Operation};
use crate::types::XattrMode;
use crate::types::now;
use crate::{Error, Result};
use cairn_btree::Tree;
use cairn_format::{ItemKind, Key, XATTR_INLINE_BYTES_MAX, XattrItem, hash_name, name_slot_range};

const NAME_BYTES_MAX: usize = 255;

/// Slot and first item of an attribute.
type FoundXattr = (u64, XattrItem);

fn part_key(inode: InodeId, slot: u64, part: usize) -> Key {
    inode.key(ItemKind::XattrPart, slot * 256 + part as u64)
}

fn check_xattr_name(name: &[u8]) -> Result<()> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        Err(Error::NameLength(name.len()))
    } else {
        Ok(())
    }
}

impl Files {
    /// The attribute's slot and first item, and the first free slot for its name. The inode is
    /// locked.
    fn find_xattr(&self, inode: InodeId, name: &[u8]) -> Result<(Option<FoundXattr>, Option<u64>)> {
        self.find_xattr_in(self.store.trees.of(inode), inode, name)
    }

    fn find_xattr_in(
        &self,
        tree: &Tree,
        inode: InodeId,
        name: &[u8],
    ) -> Result<(Option<FoundXattr>, Option<u64>)> {
        let slots = name_slot_range(hash_name(&self.store.superblock.hash_seed, name));
        let mut free = Some(*slots.start());
        for item in tree.range(
            inode.key(ItemKind::Xattr, *slots.start())..=inode.key(ItemKind::Xattr, *slots.end()),
        ) {
            let (key, value) = item?;
            let found = self.store.of_item(inode, &key, XattrItem::decode(&value))?;
            if found.name == name {
                return Ok((Some((key.offset, found)), free));
            }
            if free == Some(key.offset) {
                free = (key.offset < *slots.end()).then_some(key.offset + 1);
            }
        }
        Ok((None, free))
    }

    /// Value of an attribute.
    pub(crate) fn get_xattr(&self, number: InodeId, name: &[u8]) -> Result<Vec<u8>> {
        let inode = self.inodes.get(number);
        let _state = self.read_inode_in_use(&inode)?;
        let (slot, item) = self.find_xattr(number, name)?.0.ok_or(Error::NoAttribute)?;
        let mut value = item.inline;
        for part in 1..=XattrItem::parts(item.value_bytes as usize) {
            value.extend(
                self.store.trees.of(number).get(&part_key(number, slot, part))?.unwrap_or_default(),
            );
        }
        if value.len() == item.value_bytes as usize {
            return Ok(value);
        }
        let problem =
            format!("an extended attribute has {} of its {} bytes", value.len(), item.value_bytes);
        Err(self.store.damaged_item(number, &number.key(ItemKind::Xattr, slot), problem))
    }

    /// Slot and value of an attribute whose value stands in one item. The inode is locked.
    pub(crate) fn inline_xattr(
        &self,
        inode: InodeId,
        name: &[u8],
    ) -> Result<Option<(u64, Vec<u8>)>> {
        let found = self.find_xattr(inode, name)?.0;
        let is_whole = |xattr: &XattrItem| xattr.inline.len() == xattr.value_bytes as usize;
        let found = found.filter(|(_, xattr)| is_whole(xattr));
        Ok(found.map(|(slot, xattr)| (slot, xattr.inline)))
    }

    /// The subvolumes whose root directories have an attribute: their ids and root directories, and
    /// the value. None is opened for it. Left out are those that have no number in this mount, that
    /// can't be read, and whose value does not stand in one item.
    pub(crate) fn subvolumes_with_xattr(
        &self,
        name: &[u8],
    ) -> Result<Vec<(u64, InodeId, Vec<u8>)>> {
        let mut found = Vec::new();
        for (id, item) in self.store.trees.all_records(&self.store.superblock)? {
            if item.is_nameless() {
                continue;
            }
            let Ok(slot) = self.store.trees.slot_of(id) else { continue };
            let root = InodeId::root_of(slot);
            let look = |tree: &Tree| Ok(self.find_xattr_in(tree, root, name)?.0);
            if let Ok(Some((_, xattr))) = self.store.trees.peek(id, slot, look)
                && xattr.inline.len() == xattr.value_bytes as usize
            {
                found.push((id.0, root, xattr.inline));
            }
        }
        Ok(found)
    }

    /// Names of all attributes.
    pub(crate) fn list_xattrs(&self, number: InodeId) -> Result<Vec<Vec<u8>>> {
        let inode = self.inodes.get(number);
        let _state = self.read_inode_in_use(&inode)?;
        self.store
            .trees
            .of(number)
            .range(number.keys(ItemKind::Xattr))
            .map(|item| {
                let (key, value) = item?;
                Ok(self.store.of_item(number, &key, XattrItem::decode(&value))?.name)
            })
            .collect()
    }

    /// Creates or replaces an attribute.
    pub(crate) fn set_xattr(
        &self,
        number: InodeId,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
    ) -> Result<()> {
        check_xattr_name(name)?;
        if value.len() > XattrItem::VALUE_BYTES_MAX {
            return Err(Error::XattrTooLarge);
        }
        let parts_max = XattrItem::parts(XattrItem::VALUE_BYTES_MAX) as u64;
        let inode = self.inodes.get(number);
        // The old value's parts are removed in the same operation; most values have none, so look
        // before reserving.
        let glance = {
            let _state = self.read_inode_in_use(&inode)?;
            self.find_xattr(number, name)?.0
        };
        let old_parts = match glance {
            Some((_, item)) if XattrItem::parts(item.value_bytes as usize) > 0 => parts_max,
            _ => 0,
        };
        let new_parts = XattrItem::parts(value.len()) as u64;
        let effort = if new_parts == 0 { Effort::Name } else { Effort::Ordinary };
        let mut operation = self.store.begin(inode.number, 2 + old_parts + new_parts, 0, effort)?;
        let mut state = self.write_inode_in_use(&inode)?;
        let (found, free) = self.find_xattr(number, name)?;
        let slot = match (&found, mode) {
            (Some(_), XattrMode::Create) => return Err(Error::Exists),
            (None, XattrMode::Replace) => return Err(Error::NoAttribute),
            (Some((slot, _)), _) => *slot,
            (None, _) => free.ok_or(Error::HashCollisions)?,
        };
        let found_parts = found.map_or(0, |(_, item)| XattrItem::parts(item.value_bytes as usize));
        if found_parts as u64 > old_parts {
            // Somebody set a large value between the look and the lock.
            drop(state);
            drop(operation);
            return self.set_xattr(number, name, value, mode);
        }
        let (inline, rest) = value.split_at(XattrItem::inline_bytes(value.len()));
        let item = XattrItem {
            name: name.to_vec(),
            value_bytes: value.len() as u32,
            inline: inline.to_vec(),
        };
        operation.put(number.key(ItemKind::Xattr, slot), &item.encode())?;
        for (index, part) in rest.chunks(XATTR_INLINE_BYTES_MAX).enumerate() {
            operation.put(part_key(number, slot, index + 1), part)?;
        }
        for part in new_parts as usize + 1..=found_parts {
            operation.delete(part_key(number, slot, part))?;
        }
        self.finish_xattr(&mut operation, number, &mut state)
    }

    /// Removes an attribute.
    pub(crate) fn remove_xattr(&self, number: InodeId, name: &[u8]) -> Result<()> {
        let inode = self.inodes.get(number);
        let parts_max = XattrItem::parts(XattrItem::VALUE_BYTES_MAX) as u64;
        let mut operation = self.begin(inode.number, 2 + parts_max, 0, Effort::Removal)?;
        let mut state = self.write_inode_in_use(&inode)?;
        let (slot, item) = self.find_xattr(number, name)?.0.ok_or(Error::NoAttribute)?;
        operation.delete(number.key(ItemKind::Xattr, slot))?;
        for part in 1..=XattrItem::parts(item.value_bytes as usize) {
            operation.delete(part_key(number, slot, part))?;
        }
        self.finish_xattr(&mut operation, number, &mut state)
    }

    fn finish_xattr(
        &self,
        operation: &mut Operation<'_>,
        number: InodeId,
        state: &mut InodeState,
    ) -> Result<()> {
        state.item.changed = now();
        operation.put_inode(number, &state.loggable())?;
        let sequence = operation.log();
        state.logged(sequence);
        Ok(())
    }
}
