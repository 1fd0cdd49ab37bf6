"""The allocator that is played on top of a plan: holes, merging, the system's own blocks, and the free end."""

from pyggtrain.training.heap import Heap, heap_peak_bytes

MIB = 1 << 20


def keeping() -> Heap:
    return Heap(mmap_threshold=32 * MIB, trim_threshold=1 << 30)


def near(found: int, wanted: int) -> bool:
    return wanted <= found < wanted + 16384


def test_freed_end_is_used_again():
    heap = keeping()
    for _ in range(5):
        heap.free(heap.allocate(3 * MIB))
    assert near(heap.peak_bytes, 3 * MIB)


def test_hole_that_is_too_small_stays_empty():
    heap = keeping()
    small, last = heap.allocate(2 * MIB), heap.allocate(MIB)
    heap.free(small)
    heap.allocate(3 * MIB)
    assert near(heap.peak_bytes, 6 * MIB)
    heap.allocate(MIB)
    assert near(heap.peak_bytes, 6 * MIB)
    heap.free(last)


def test_neighbouring_holes_become_one():
    heap = keeping()
    first, second, third, _ = (heap.allocate(MIB) for _ in range(4))
    heap.free(first)
    heap.free(third)
    heap.free(second)
    heap.allocate(2 * MIB)
    assert near(heap.peak_bytes, 4 * MIB)


def test_smallest_hole_that_fits_is_taken():
    heap = keeping()
    large, _, small, _ = (heap.allocate(size * MIB) for size in (4, 1, 2, 1))
    heap.free(large)
    heap.free(small)
    heap.allocate(MIB)
    heap.allocate(4 * MIB - 1024)
    assert near(heap.peak_bytes, 8 * MIB)


def test_large_blocks_are_the_systems_and_go_back():
    heap = Heap(mmap_threshold=MIB, trim_threshold=128 << 10)
    kept = heap.allocate(2 * MIB)
    for _ in range(3):
        heap.free(heap.allocate(5 * MIB))
    assert near(heap.peak_bytes, 7 * MIB)
    heap.free(kept)
    heap.allocate(6 * MIB)
    assert near(heap.peak_bytes, 7 * MIB)


def test_free_end_goes_back_only_beyond_the_threshold():
    for trim_threshold, peak in ((MIB, 12), (1 << 30, 18)):
        heap = Heap(mmap_threshold=12 * MIB, trim_threshold=trim_threshold)
        heap.free(heap.allocate(6 * MIB))
        heap.allocate(12 * MIB)
        assert near(heap.peak_bytes, peak * MIB)


def test_a_sequence_is_played():
    options = {"mmap_threshold": 32 * MIB, "trim_threshold": 1 << 30}
    assert near(heap_peak_bytes([MIB, 2 * MIB, MIB // 2], [0, 1, -1, 2, -2], **options), 3 * MIB)
