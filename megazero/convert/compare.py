"""How two checkpoints of any kind differ, tensor by tensor. One tensor of each is in memory at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

from megazero.convert.contents import (
    Contents,
    StoredTensor,
    distance,
    is_hugging_face,
    norm,
    open_canonical,
    open_contents,
)
from megazero.errors import ConvertError


@dataclass(frozen=True)
class Difference:
    """Of one tensor. ``error``: norm of the difference over the larger of the two norms, inf where they have no
    difference: it is ``missing`` in ``first`` or ``second``, or its shapes (``first``, ``second``) are not the same.
    """

    kind: str
    name: str
    error: float
    missing: str | None = None
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Pair:
    """Two checkpoints under names that both have. ``notes``: what is not compared, or not as one would expect."""

    first: Contents
    second: Contents
    notes: tuple[str, ...]

    def differences(self) -> Iterator[Difference]:
        """One per tensor that either has, of the kinds that both have, in order."""
        both = _kinds(self.first) & _kinds(self.second)
        sides = [{(t.kind, t.name): t for t in side.tensors if t.kind in both} for side in (self.first, self.second)]
        for key in dict.fromkeys([*sides[0], *sides[1]]):
            one, other = sides[0].get(key), sides[1].get(key)
            if one is None or other is None:
                yield Difference(*key, math.inf, missing="first" if one is None else "second")
            elif one.shape != other.shape:
                yield Difference(*key, math.inf, shapes=(one.shape, other.shape))
            else:
                yield Difference(*key, relative_error(one, other))


def open_pair(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> Pair:
    """Two checkpoints to compare, of the same kind or not; CheckpointError or ConvertError.

    Hugging Face directories are taken under our names, so that families and ways of writing may differ. Two of which
    one cannot be (another family, or not whole) are compared by the names in their files.
    """
    notes = []
    try:
        pair = open_canonical(first), open_canonical(second)
    except ConvertError as error:
        if not (is_hugging_face(first) and is_hugging_face(second)):
            raise
        pair = open_contents(first), open_contents(second)
        notes.append(f"compared by the names in their files: {error}")
    for here, there, which in ((*pair, "first"), (*reversed(pair), "second")):
        if alone := sorted(_kinds(here) - _kinds(there)):
            notes.append(f"not compared, since only the {which} has them: {', '.join(alone)}")
    return Pair(*pair, tuple(notes))


def relative_error(one: StoredTensor, other: StoredTensor) -> float:
    """The norm of their difference over the larger of their norms; 0 where they are the same, inf where not finite."""
    a, b = one.read(), other.read()
    gap = distance(a, b)
    if gap == 0.0:
        return 0.0
    scale = max(norm(a), norm(b))
    return gap / scale if math.isfinite(scale) and math.isfinite(gap) else math.inf


def _kinds(contents: Contents) -> set[str]:
    return {tensor.kind for tensor in contents.tensors}
