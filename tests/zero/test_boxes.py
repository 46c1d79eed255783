"""flat_range_boxes against an element-by-element look-up."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.sharding import Piece, Rectangle, flat_range_boxes


@st.composite
def ranges(draw: st.DrawFn) -> tuple[Piece, int, int]:
    """A box of a tensor of one to three dims, and a range of its elements."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    offsets = tuple(draw(st.integers(0, 3)) for _ in shape)
    around = tuple(o + n + draw(st.integers(0, 2)) for o, n in zip(offsets, shape))
    start = draw(st.integers(0, math.prod(shape)))
    end = draw(st.integers(start, math.prod(shape)))
    return Piece("x", around, Rectangle(offsets, shape)), start, end


@settings(derandomize=True, deadline=None, max_examples=100)
@given(ranges())
def test_boxes_are_the_elements_of_the_range_in_order(drawn: tuple[Piece, int, int]) -> None:
    piece, start, end = drawn
    numbers = np.arange(math.prod(piece.global_shape)).reshape(piece.global_shape)
    region = numbers[tuple(slice(o, o + n) for o, n in zip(piece.box.offsets, piece.box.shape))]
    flat = region.reshape(-1)
    position = start
    for first, box in flat_range_boxes(piece, start, end):
        assert first == position
        values = numbers[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape))]
        assert np.array_equal(values.reshape(-1), flat[first : first + box.numel])
        position += box.numel
    assert position == end


@settings(derandomize=True, deadline=None, max_examples=100)
@given(ranges())
def test_a_range_of_a_matrix_is_at_most_three_boxes(drawn: tuple[Piece, int, int]) -> None:
    piece, start, end = drawn
    assert len(flat_range_boxes(piece, start, end)) <= 2 * len(piece.box.shape) - 1


def test_boxes_of_a_tensor_past_32_bits() -> None:
    shape = (1 << 20, 1 << 14)
    piece = Piece("x", shape, Rectangle((0, 0), shape))
    start = (1 << 33) + 5
    boxes = flat_range_boxes(piece, start, start + (1 << 14))
    row = (1 << 33) >> 14
    assert boxes == [
        (start, Rectangle((row, 5), (1, (1 << 14) - 5))),
        (start + (1 << 14) - 5, Rectangle((row + 1, 0), (1, 5))),
    ]
