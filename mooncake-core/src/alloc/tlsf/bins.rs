//! Size classes: which list a free block is filed in, and which lists are not empty.

use super::blocks::NIL;

/// Classes per power of two, as a power of two: neighbouring classes differ by at most 1/64 in size.
const CLASS_BITS: u32 = 6;
const CLASSES: u32 = 1 << CLASS_BITS;

/// Number of a size class; larger classes hold larger blocks.
pub(super) type Class = u32;

/// Class of a block of `len` bytes. Below 128 every length is a class of its own.
pub(super) fn class_of(len: u64) -> Class {
    let shift = (len | u64::from(CLASSES)).ilog2() - CLASS_BITS;
    (shift << CLASS_BITS) + (len >> shift) as u32
}

/// Shortest length of a class.
#[cfg(test)]
pub(super) fn class_floor(class: Class) -> u64 {
    if class < 2 * CLASSES {
        return u64::from(class);
    }
    let shift = (class >> CLASS_BITS) - 1;
    u64::from((class & (CLASSES - 1)) | CLASSES) << shift
}

/// List heads of all classes that can occur, with one bit for each list that is not empty.
pub(super) struct Bins {
    /// Bit r: row r has a list that is not empty.
    rows_used: u64,
    rows: Vec<Row>,
}

struct Row {
    used: u64,
    heads: [u32; CLASSES as usize],
}

impl Bins {
    /// Lists for blocks up to `longest` bytes.
    pub(super) fn new(longest: u64) -> Self {
        let rows = (class_of(longest) >> CLASS_BITS) + 1;
        let empty = || Row { used: 0, heads: [NIL; CLASSES as usize] };
        Self { rows_used: 0, rows: (0..rows).map(|_| empty()).collect() }
    }

    /// First block filed in `class`, or `NIL`.
    pub(super) fn head(&self, class: Class) -> u32 {
        self.rows[(class >> CLASS_BITS) as usize].heads[(class & (CLASSES - 1)) as usize]
    }

    /// Makes `block` the first of `class`; `NIL` empties the list.
    pub(super) fn set_head(&mut self, class: Class, block: u32) {
        let (row_index, column) = (class >> CLASS_BITS, class & (CLASSES - 1));
        let row = &mut self.rows[row_index as usize];
        row.heads[column as usize] = block;
        let filled = u64::from(block != NIL);
        row.used = row.used & !(1 << column) | filled << column;
        let filled = u64::from(row.used != 0);
        self.rows_used = self.rows_used & !(1 << row_index) | filled << row_index;
    }

    /// The smallest class from `class` upwards with a block in it.
    pub(super) fn first_from(&self, class: Class) -> Option<Class> {
        let (row, column) = (class >> CLASS_BITS, class & (CLASSES - 1));
        let here = self.rows.get(row as usize)?.used & (u64::MAX << column);
        if here != 0 {
            return Some((row << CLASS_BITS) + here.trailing_zeros());
        }
        let above = self.rows_used & (u64::MAX << row) & !(1 << row);
        if above == 0 {
            return None;
        }
        let row = above.trailing_zeros();
        Some((row << CLASS_BITS) + self.rows[row as usize].used.trailing_zeros())
    }

    /// The largest class with a block in it.
    pub(super) fn last(&self) -> Option<Class> {
        let row = self.rows_used.checked_ilog2()?;
        Some((row << CLASS_BITS) + self.rows[row as usize].used.ilog2())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_ordered_and_tight() {
        for len in (0..5000).chain((12..64).flat_map(|bit| [(1 << bit) - 1, 1 << bit, (1 << bit) + 17])) {
            let class = class_of(len);
            assert!(class_floor(class) <= len, "{len}");
            assert!(len == u64::MAX || len < class_floor(class + 1), "{len}");
            assert_eq!(class_of(class_floor(class)), class, "{len}");
            assert!(len - class_floor(class) <= len / 64, "{len}");
        }
        assert!(class_of(u64::MAX) >> CLASS_BITS < 64);
    }

    #[test]
    fn finds_neighbours() {
        let mut bins = Bins::new(u64::MAX);
        assert_eq!((bins.first_from(0), bins.last()), (None, None));
        let top = class_of(u64::MAX);
        for class in [3, 64, 200, top] {
            bins.set_head(class, class);
        }
        assert_eq!(bins.first_from(0), Some(3));
        assert_eq!(bins.first_from(4), Some(64));
        assert_eq!(bins.first_from(65), Some(200));
        assert_eq!(bins.first_from(201), Some(top));
        assert_eq!(bins.last(), Some(top));
        bins.set_head(top, NIL);
        bins.set_head(64, NIL);
        assert_eq!((bins.first_from(4), bins.first_from(201), bins.last()), (Some(200), None, Some(200)));
        assert_eq!(bins.head(200), 200);
    }
}
