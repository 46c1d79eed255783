"""What a run keeps off its devices: bytes in host memory and in files, bytes moved per step, and the time that takes.

Bytes are exact. Seconds are what each resource needs by itself; the slowest bounds the update, which hides behind the
forward that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megazero.config import Config
from megazero.planner.chips import Host
from megazero.planner.model_state import BYTES, Buffer, leaving_buffers, values_leave
from megazero.zero.offload.settings import Offload
from megazero.zero.offload.sizes import BlockShare
from megazero.zero.offload.store import stored_fields
from megazero.zero.offload.values import pages_of


def block_shares(
    buffers: Sequence[Buffer], stage: int, precision: str, grad_dtype: str, offload: Offload
) -> list[BlockShare]:
    """What a rank owns of each, and where that is kept."""
    leaving = leaving_buffers(buffers, offload)
    return [
        BlockShare(
            buffer.layout.numel // (buffer.layout.shards if stage >= 1 else 1),
            index in leaving,
            values_leave(buffer, stage, offload),
            BYTES[precision],
            BYTES[grad_dtype],
        )
        for index, buffer in enumerate(buffers)
    ]


@dataclass(frozen=True)
class Moved:
    """Bytes of one rank and step. ``out``, ``back``: between device and host; ``files``: read, and as many written,
    page by page. Of parameters in files: ``fetched`` from them, in whole pages, and new ones ``written``."""

    out: int
    back: int
    files: int
    fetched: int
    written: int


def moved(shares: Sequence[BlockShare], stage: int, offload: Offload, micro_batches: int, gathers: int) -> Moved:
    """``gathers``: how often a step makes parameters whole, which fetches those off the device.

    Where gradients are cut (stages 2 and 3) every micro-batch's leave, and come back for the next to be added.
    """
    out = back = files = fetched = written = 0
    reductions = micro_batches if stage >= 2 else 1
    for share in shares:
        if share.values_leave:
            back += gathers * share.numel * share.value
        if share.values_leave and offload.parameters == "nvme":
            fetched += gathers * pages_of(share.numel * share.value)
            written += share.numel * share.value
        if not share.state_leaves:
            continue
        out += reductions * share.numel * share.gradient
        value = 4 if offload.sends_masters(share.values_leave) else share.value
        back += share.numel * ((reductions - 1) * share.gradient + (0 if share.values_leave else value))
        if offload.optimizer == "nvme":
            files += share.numel * sum(dtype.itemsize for dtype in stored_fields(offload, share.values_leave).values())
    return Moved(out, back, files, fetched, written)


@dataclass(frozen=True)
class HostSeconds:
    """Seconds per step of one rank if nothing else ran. ``gradients``, ``parameters``: on the link between device and
    host, per micro-batch, or, of parameters in files, from the disk; ``update``: the CPU's AdamW on host memory;
    ``values``: new parameters back; ``files``: those of the update."""

    gradients: float
    parameters: float
    update: float
    values: float
    files: float

    @property
    def exposable(self) -> float:
        """Of all that follows the last gradient, pipelined."""
        return max(self.update, self.values, self.files)

    def bound(self) -> str:
        """What the update waits for."""
        named = {"host memory, by the CPU's AdamW": self.update, "the link": self.values, "the disk": self.files}
        return max(named, key=lambda name: named[name])


FEW_BITS = 80
"""Bytes of host memory that the cores could pass over in the time that an element's update takes where state is kept in
fewer bits: 0.72 and 0.83 ns on 16 cores with 107 GB/s (docs/offload.md), most of it to change the form."""


def host_seconds(config: Config, leaving: int, fetched: int, precision: str, host: Host) -> HostSeconds:
    """On a GPU's share of a machine. ``leaving``: elements whose state the rank keeps off the device; ``fetched``: of
    parameters that it does."""
    offload, grad, value = Offload.of(config.zero), BYTES[config.train.grad_dtype], BYTES[precision]
    away = offload.parameters != "none" and config.zero.stage >= 3
    filed = away and offload.parameters == "nvme"
    stored = sum(dtype.itemsize for dtype in stored_fields(offload, away).values()) if leaving else 0
    touched = max(2 * stored + grad + 2 * value, FEW_BITS if offload.few_bits else 0)
    both = 1 if offload.pipeline_read and offload.pipeline_write else 2
    return HostSeconds(
        gradients=leaving * grad / host.link,
        parameters=fetched * value / (min(host.link, host.disk) if filed else host.link),
        update=leaving * touched / host.bandwidth,
        values=0.0 if away else leaving * (4 if offload.sends_masters(away) else value) / host.link,
        files=leaving * (stored * both * (offload.optimizer == "nvme") + value * filed) / host.disk,
    )
