"""Keys and values of the tokens so far, so that each token goes through the model once."""

from __future__ import annotations

import copy

import torch

_MARGIN = 256
"""Slots beyond what is needed at first."""


class KeyValueCache:
    """The cache of one batch on one pipeline stage: row b's token at position p lies in slot p of row b.

    Rows of unequal length need nothing more: what lies in slots after a row's own position is padding or is not
    written yet, and a causal mask by position never looks there.

    A layer's buffers are made when it first has something to keep, so heads and sizes are those that this rank's
    attention computes, and grow as they fill. ``capacity``: slots per row at most.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._layer = -1

    @property
    def layers(self) -> int:
        """How many layers have kept something."""
        return len(self._buffers)

    def begin(self, positions_BS: torch.Tensor, length: int) -> None:
        """The tokens about to go through stand at these positions, all below ``length``."""
        self._rows_B1 = torch.arange(positions_BS.shape[0], device=positions_BS.device)[:, None]
        self._positions_BS, self._length = positions_BS, length

    def of_layer(self, index: int) -> KeyValueCache:
        """The part that belongs to the layer of that global index: the same buffers, that layer's turn."""
        part = copy.copy(self)
        part._layer = index
        return part

    def extend(self, k_BSgD: torch.Tensor, v_BSgD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the layer's keys and values; returns those of the first ``length`` slots, (B, length, g, D), views."""
        keys, values = self._buffers.get(self._layer, (k_BSgD[:, :0], v_BSgD[:, :0]))
        if keys.shape[1] < self._length:
            # Not all at once: a limit that is never reached, say a million tokens, must not be paid for.
            slots = min(self._capacity, max(2 * keys.shape[1], self._length + _MARGIN))
            keys, values = _with_slots(keys, slots), _with_slots(values, slots)
            self._buffers[self._layer] = keys, values
        keys[self._rows_B1, self._positions_BS] = k_BSgD
        values[self._rows_B1, self._positions_BS] = v_BSgD
        return keys[:, : self._length], values[:, : self._length]

    def keep(self, rows: torch.Tensor) -> None:
        """Forget all rows but these, ascending."""
        for layer, (keys, values) in self._buffers.items():
            self._buffers[layer] = (keys[rows], values[rows])


def _with_slots(buffer_BSgD: torch.Tensor, slots: int) -> torch.Tensor:
    rows, length, *rest = buffer_BSgD.shape
    larger_BSgD = buffer_BSgD.new_zeros(rows, slots, *rest)
    larger_BSgD[:, :length] = buffer_BSgD
    return larger_BSgD
