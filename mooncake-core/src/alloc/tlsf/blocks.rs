//! The blocks a segment is divided into, in a table beside it: the memory itself may be on another machine.

/// No block.
pub(super) const NIL: u32 = u32::MAX;
/// In `older`: the block is live, so it is in no list.
const LIVE: u32 = u32::MAX - 1;

/// One contiguous range, free or live. Two free blocks never touch.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) offset: u64,
    pub(super) len: u64,
    /// The block that ends where this one starts.
    pub(super) before: u32,
    /// The block that starts where this one ends; links unused entries.
    pub(super) after: u32,
    /// Neighbours in the list of its size class. `newer` is nearer to the head.
    pub(super) newer: u32,
    pub(super) older: u32,
}

impl Block {
    pub(super) fn is_free(&self) -> bool {
        self.older != LIVE
    }
}

/// All blocks; an index stays valid until the block is merged away.
pub(super) struct Blocks {
    table: Vec<Block>,
    /// First unused entry of the table.
    spare: u32,
}

impl Blocks {
    pub(super) fn new() -> Self {
        Self { table: Vec::new(), spare: NIL }
    }

    /// Whether two more blocks can be numbered.
    pub(super) fn has_room(&self) -> bool {
        self.table.len() < (LIVE - 2) as usize
    }

    /// A live block without neighbours.
    pub(super) fn add(&mut self, offset: u64, len: u64) -> u32 {
        let block = Block { offset, len, before: NIL, after: NIL, newer: NIL, older: LIVE };
        if self.spare == NIL {
            self.table.push(block);
            return (self.table.len() - 1) as u32;
        }
        let index = self.spare;
        self.spare = self[index].after;
        self[index] = block;
        index
    }

    /// A live block put between `at` and the block before it.
    pub(super) fn add_before(&mut self, at: u32, offset: u64, len: u64) -> u32 {
        let new = self.add(offset, len);
        let before = std::mem::replace(&mut self[at].before, new);
        self[new].before = before;
        self[new].after = at;
        if before != NIL {
            self[before].after = new;
        }
        new
    }

    /// A live block put between `at` and the block after it.
    pub(super) fn add_after(&mut self, at: u32, offset: u64, len: u64) -> u32 {
        let new = self.add(offset, len);
        let after = std::mem::replace(&mut self[at].after, new);
        self[new].before = at;
        self[new].after = after;
        if after != NIL {
            self[after].before = new;
        }
        new
    }

    /// Takes a block out of the chain of neighbours and frees its entry.
    pub(super) fn drop_block(&mut self, index: u32) {
        let Block { before, after, .. } = self[index];
        if before != NIL {
            self[before].after = after;
        }
        if after != NIL {
            self[after].before = before;
        }
        self[index].after = self.spare;
        self.spare = index;
    }

    pub(super) fn mark_live(&mut self, index: u32) {
        self[index].older = LIVE;
    }
}

impl std::ops::Index<u32> for Blocks {
    type Output = Block;

    fn index(&self, index: u32) -> &Block {
        &self.table[index as usize]
    }
}

impl std::ops::IndexMut<u32> for Blocks {
    fn index_mut(&mut self, index: u32) -> &mut Block {
        &mut self.table[index as usize]
    }
}
