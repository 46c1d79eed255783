"""Bytes of what one rank keeps off its device, before any of it is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megazero.errors import ConfigError
from megazero.zero.blocks import BlockPlan
from megazero.zero.flat import FlatLayout
from megazero.zero.offload.formats import OFFSETS
from megazero.zero.offload.media import record_places
from megazero.zero.offload.settings import Offload
from megazero.zero.offload.store import masters_of, stored_fields
from megazero.zero.offload.values import file_and_slots


class BlockShare(NamedTuple):
    """What a rank owns of a block: ``numel`` elements, padding included. ``state_leaves``: its float32 state is kept
    off the device; ``values_leave``: its parameters are. ``value``, ``gradient``: bytes of an element of each."""

    numel: int
    state_leaves: bool
    values_leave: bool
    value: int
    gradient: int


@dataclass(frozen=True)
class HostState:
    """Bytes of one rank. ``state``: masters and moments in host memory; ``files``: those on disk instead, ``record``:
    of the largest piece; ``buffers``: what the update and the copies work in, ``parameter_slots`` of it what parameters
    pass through that are in a file, of ``parameter_files``."""

    parameters: int
    gradients: int
    state: int
    files: int
    record: int
    buffers: int
    parameter_files: int = 0
    parameter_slots: int = 0

    @property
    def on_disk(self) -> int:
        """Bytes of files."""
        return self.files + self.parameter_files

    @property
    def memory(self) -> int:
        """Bytes of host memory."""
        return self.parameters + self.gradients + self.state + self.buffers


def leaving_blocks(sizes: Sequence[int], offload: Offload) -> set[int]:
    """Indices of the blocks whose float32 state is kept off the device: the last ones, up to ``ratio`` of it all. The
    first are what the next forward needs first. ``sizes``: elements of each block, 0 of one that is not trained."""
    if offload.optimizer == "none":
        return set()
    left = round(offload.ratio * sum(sizes))  # a float's rounding is no reason for one more
    found = set()
    for index in reversed(range(len(sizes))):
        if sizes[index] and left > 0:
            found.add(index)
            left -= sizes[index]
    return found


def shares_of(
    plans: Sequence[tuple[BlockPlan, FlatLayout]], ranks: int, cuts: bool, grad_dtype: torch.dtype, offload: Offload
) -> list[BlockShare]:
    """What a rank owns of each block, one of ``ranks`` equal parts. ``cuts``: parameters are cut into these, too.

    Raises ConfigError where masters are to be made of bfloat16 parameters, and there are others."""
    leaving = leaving_blocks([layout.numel if plan.trainable else 0 for plan, layout in plans], offload)
    away = offload.parameters != "none" and cuts
    if offload.masters != "fp32" and any(plans[index][0].dtype != torch.bfloat16 for index in leaving):
        told = f"{offload.masters} is made of bfloat16 parameters, and others are trained; use bf16, or masters fp32"
        raise ConfigError.single("offload_optimizer.masters", told)
    return [
        BlockShare(
            layout.numel // ranks,
            index in leaving,
            away and not plan.persistent,
            plan.dtype.itemsize,
            grad_dtype.itemsize,
        )
        for index, (plan, layout) in enumerate(plans)
    ]


def host_state(shares: Sequence[BlockShare], offload: Offload, gpu: bool) -> HostState:
    """``gpu``: the device has memory of its own, to which values go through pinned buffers."""
    values = [share.numel * share.value for share in shares if share.values_leave]
    in_files = offload.parameters == "nvme"
    parameters = 0 if in_files else sum(values)
    parameter_files, parameter_slots = file_and_slots(values if in_files else ())
    leaving = [share for share in shares if share.state_leaves]
    gradients = sum(share.numel * share.gradient for share in leaving)
    state = files = record = 0
    for share in leaving:
        fields = stored_fields(offload, share.values_leave)
        if offload.optimizer == "nvme":
            sizes = [
                record_places(fields, min(offload.buffer_size, share.numel - start))[1]
                for start in range(0, share.numel, offload.buffer_size)
            ]
            files, record = files + sum(sizes), max(record, *sizes)
        elif offload.plain:
            own_master = share.value == 4 and share.values_leave and offload.parameters == "cpu"
            state += share.numel * (8 if own_master else 12)  # a float32 value beside them is its own master
        else:
            state += share.numel * sum(dtype.itemsize for dtype in fields.values())
    buffers = offload.buffer_count * record + parameter_slots
    if leaving:
        buffers += _scratch(leaving, offload)
    if gpu and any(not share.values_leave and not offload.sends_masters(False) for share in leaving):
        # New values on their way to the device.
        buffers += offload.buffer_count * offload.buffer_size * 4
    return HostState(parameters, gradients, state, files, record, buffers, parameter_files, parameter_slots)


def _scratch(leaving: Sequence[BlockShare], offload: Offload) -> int:
    """Room for a piece's float32 gradient, for what is stored otherwise, and the bits that round at random."""
    masters = any(masters_of(offload, share.values_leave) != "fp32" for share in leaving)
    pieces = 1 + 2 * (offload.moments == "bf16") + masters
    noise = "bf16" in (offload.moments, offload.masters)
    return 4 * (pieces * offload.buffer_size + noise * (offload.buffer_size + OFFSETS))
