//! One aligned block of memory, and raw views into it.

use graph::ALIGN;
use std::alloc::Layout;
use std::ops::Range;

/// A zeroed block of memory, shared by the steps that the plan keeps apart.
pub struct Block {
    /// Address from the allocator, with room to start at a border.
    start: *mut u8,
    layout: Layout,
    /// The first byte used, at a border.
    ptr: *mut u8,
    bytes: usize,
}

/// Large blocks start at the border of a huge page, so that the kernel can back them with huge pages.
fn border(bytes: usize) -> usize {
    const HUGE_PAGE: usize = 2 << 20;
    if bytes >= HUGE_PAGE { HUGE_PAGE } else { ALIGN }
}

// SAFETY: a block is plain memory; who may touch which part when is decided by the plan (see `Executor::run`).
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    /// None if there is not that much.
    pub fn new(bytes: usize) -> Option<Self> {
        let bytes = bytes.max(ALIGN);
        // Room to start at the next border, whatever address comes: an aligned allocation would be zeroed by hand,
        // page by small page, where a plain large one comes zeroed from the kernel and untouched.
        let layout = Layout::from_size_align(bytes.checked_add(border(bytes))?, 16).ok()?;
        // SAFETY: the layout's size is not zero.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        if start.is_null() {
            return None;
        }
        // SAFETY: the shift is less than a border, for which there is room.
        let ptr = unsafe { start.add(start.align_offset(border(bytes))) };
        advise_huge_pages(ptr, bytes);
        Some(Block { start, layout, ptr, bytes })
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// A view of `len` elements at byte `offset`.
    pub fn view<T>(&self, offset: usize, len: usize) -> View<T> {
        assert!(offset.is_multiple_of(align_of::<T>()) && offset + len * size_of::<T>() <= self.bytes());
        // SAFETY: in bounds by the assertion.
        View { ptr: unsafe { self.ptr.add(offset) }.cast(), len }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { std::alloc::dealloc(self.start, self.layout) };
    }
}

#[cfg(target_os = "linux")]
fn advise_huge_pages(ptr: *mut u8, bytes: usize) {
    if border(bytes) > ALIGN {
        // SAFETY: the range is our own allocation, and the advice changes no content. Failure costs only speed.
        unsafe { libc::madvise(ptr.cast(), bytes, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages(_: *mut u8, _: usize) {}

/// A typed range of a block. Copies freely between threads; every access says what it relies on.
pub struct View<T> {
    ptr: *mut T,
    len: usize,
}

impl<T> Clone for View<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for View<T> {}

// SAFETY: a view is an address; the unsafe accessors carry the obligations.
unsafe impl<T: Send> Send for View<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for View<T> {}

impl<T> View<T> {
    pub const EMPTY: View<T> = View { ptr: std::ptr::NonNull::dangling().as_ptr(), len: 0 };

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn address(&self) -> *mut T {
        self.ptr
    }

    /// The address of an element.
    pub fn at(&self, index: usize) -> *mut T {
        self.part(index..self.len).ptr
    }

    /// The same memory as `len` elements of another type.
    pub fn cast<U>(&self, len: usize) -> View<U> {
        if len == 0 {
            return View::EMPTY;
        }
        let ptr: *mut U = self.ptr.cast();
        assert!(ptr.is_aligned() && len * size_of::<U>() <= self.len * size_of::<T>());
        View { ptr, len }
    }

    pub fn same_place(&self, other: &View<T>) -> bool {
        self.ptr == other.ptr
    }

    /// The part of this view that `range` covers.
    pub fn part(&self, range: Range<usize>) -> View<T> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: in bounds by the assertion.
        View { ptr: unsafe { self.ptr.add(range.start) }, len: range.end - range.start }
    }

    /// # Safety
    /// Nobody writes this range while the slice lives.
    pub unsafe fn read<'a>(self) -> &'a [T] {
        // SAFETY: in bounds by construction, initialised since blocks start zeroed; the caller forbids writers.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }

    /// # Safety
    /// Nobody else reads or writes this range while the slice lives.
    pub unsafe fn write<'a>(self) -> &'a mut [T] {
        // SAFETY: as in `read`; the caller forbids every other access.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_machine_has_is_refused_quietly() {
        for bytes in [usize::MAX, isize::MAX as usize, 1 << 60] {
            assert!(Block::new(bytes).is_none());
        }
        assert_eq!(Block::new(1000).map(|block| block.bytes()), Some(1000));
    }
}
