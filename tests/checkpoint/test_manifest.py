"""What of a tensor nobody holds, from the boxes that are held."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megazero.checkpoint import manifest
from megazero.sharding import Rectangle, whole
from megazero.zero.flat import FlatLayout


def mask(shape: tuple[int, ...], boxes: list[Rectangle]) -> np.ndarray:
    held = np.zeros(shape, int)
    for box in boxes:
        held[box.within(Rectangle((0,) * len(shape), shape))] += 1
    return held


def test_uncovered_is_what_no_box_holds() -> None:
    rng = random.Random(0)
    for _ in range(60):
        shape = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(1, 4)))
        boxes = []
        for _ in range(rng.randrange(6)):
            offsets = tuple(rng.randrange(n) for n in shape)
            sizes = tuple(rng.randrange(1, n - o + 1) for n, o in zip(shape, offsets, strict=True))
            boxes.append(Rectangle(offsets, sizes))
        left = manifest.uncovered(Rectangle((0,) * len(shape), shape), boxes)
        assert np.array_equal(mask(shape, left), mask(shape, boxes) == 0)


@pytest.mark.parametrize("order", ["as ranks are numbered", "any"])
def test_the_slices_of_many_ranks_are_gone_through_once(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """Of a matrix in 1,000 slices: in any order a few boxes are compared with each, not hundreds."""
    layout = FlatLayout.build("block", {"w": whole("w", (333, 1000))}, 1000, lambda *_: "group")
    slices = [box for rank in range(1000) for _, _, box in layout.boxes(*layout.shard(rank))]
    if order == "any":
        random.Random(1).shuffle(slices)
    compared, subtract = [], manifest._subtract
    monkeypatch.setattr(manifest, "_subtract", lambda *boxes: compared.append(boxes) or subtract(*boxes))
    assert not manifest.uncovered(Rectangle((0, 0), (333, 1000)), slices)
    assert len(slices) > 1000 and len(compared) <= 4 * len(slices)
