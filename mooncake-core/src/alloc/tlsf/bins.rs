//! Size classes, and a bitmap of the classes that have free blocks.

/// Logarithm of the number of classes per power of two. Neighbouring classes differ by at most 1/64
/// in size.
const CLASS_BITS: u32 = 6;
const CLASSES: u32 = 1 << CLASS_BITS;

/// Number of a size class. Larger classes hold larger blocks.
pub(super) type Class = u32;

/// Returns the class of a block of `len` bytes. Below 128, every length is a class of its own.
pub(super) fn class_of(len: u64) -> Class {
    let shift = (len | u64::from(CLASSES)).ilog2() - CLASS_BITS;
    (shift << CLASS_BITS) + (len >> shift) as u32
}

/// Bitmaps with one bit for each class that has a block, and one for each 64 classes that have one.
pub(super) struct Bins {
    rows: u64,
    classes: [u64; 64],
}

impl Bins {
    pub(super) fn new() -> Self {
        Self { rows: 0, classes: [0; 64] }
    }

    pub(super) fn mark_filled(&mut self, class: Class) {
        let (row, column) = split(class);
        self.rows |= 1 << row;
        self.classes[row] |= 1 << column;
    }

    /// Marks `class` empty when `emptied`. The flag is hard to predict, so there is no branch.
    pub(super) fn mark_emptied(&mut self, class: Class, emptied: bool) {
        let (row, column) = split(class);
        self.classes[row] &= !(u64::from(emptied) << column);
        self.rows &= !(u64::from(self.classes[row] == 0) << row);
    }

    /// Returns the smallest class from `class` upwards that has a block.
    pub(super) fn first_from(&self, class: Class) -> Option<Class> {
        let (row, column) = split(class);
        let here = self.classes[row] & (u64::MAX << column);
        if here != 0 {
            return Some(join(row, here.trailing_zeros()));
        }
        let above = self.rows & (u64::MAX << row) & !(1 << row);
        if above == 0 {
            return None;
        }
        let row = above.trailing_zeros() as usize;
        Some(join(row, self.classes[row].trailing_zeros()))
    }

    /// Returns the largest class that has a block.
    pub(super) fn last(&self) -> Option<Class> {
        let row = self.rows.checked_ilog2()? as usize;
        Some(join(row, self.classes[row].ilog2()))
    }
}

/// Returns the row and the column of a class. The largest class is in row 58, so the mask only
/// tells the compiler the bound.
fn split(class: Class) -> (usize, u32) {
    ((class >> CLASS_BITS) as usize & 63, class & (CLASSES - 1))
}

fn join(row: usize, column: u32) -> Class {
    ((row as u32) << CLASS_BITS) + column
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the shortest length of a class.
    fn class_floor(class: Class) -> u64 {
        if class < 2 * CLASSES {
            return u64::from(class);
        }
        let shift = (class >> CLASS_BITS) - 1;
        u64::from((class & (CLASSES - 1)) | CLASSES) << shift
    }

    #[test]
    fn classes_are_ordered_and_tight() {
        for len in (0..5000).chain((12..64).flat_map(|bit| [(1 << bit) - 1, 1 << bit, (1 << bit) + 17])) {
            let class = class_of(len);
            assert!(class_floor(class) <= len, "{len}");
            assert!(len == u64::MAX || len < class_floor(class + 1), "{len}");
            assert_eq!(class_of(class_floor(class)), class, "{len}");
            assert!(len - class_floor(class) <= len / 64, "{len}");
        }
        assert!(class_of(u64::MAX) + 1 < 64 * CLASSES);
    }

    #[test]
    fn finds_neighbours() {
        let mut bins = Bins::new();
        assert_eq!((bins.first_from(0), bins.last()), (None, None));
        let top = class_of(u64::MAX);
        for class in [3, 64, 200, top] {
            bins.mark_filled(class);
        }
        assert_eq!(bins.first_from(0), Some(3));
        assert_eq!(bins.first_from(4), Some(64));
        assert_eq!(bins.first_from(65), Some(200));
        assert_eq!(bins.first_from(201), Some(top));
        assert_eq!((bins.last(), bins.first_from(top + 1)), (Some(top), None));
        bins.mark_emptied(top, true);
        bins.mark_emptied(64, true);
        bins.mark_emptied(200, false);
        assert_eq!((bins.first_from(4), bins.first_from(201), bins.last()), (Some(200), None, Some(200)));
    }
}
