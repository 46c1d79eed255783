"""What a run keeps off its devices: bytes in host memory and in files, bytes moved per step, and the time that takes.

Bytes are exact. Seconds are what each resource needs by itself; the slowest bounds the update, which hides behind the
forward that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megazero.config import Config
from megazero.planner.chips import Host
from megazero.planner.model_state import BYTES, Buffer, leaving_buffers, owned_elements, values_leave
from megazero.zero.offload.formats import OFFSETS
from megazero.zero.offload.media import record_places
from megazero.zero.offload.settings import Offload
from megazero.zero.offload.store import stored_fields


@dataclass(frozen=True)
class HostState:
    """Bytes of one rank. ``state``: masters and moments in host memory; ``files``: those on disk instead; ``buffers``:
    what the update and the copies work in."""

    parameters: int
    gradients: int
    state: int
    files: int
    buffers: int

    @property
    def memory(self) -> int:
        """Bytes of host memory."""
        return self.parameters + self.gradients + self.state + self.buffers


@dataclass(frozen=True)
class Moved:
    """Bytes of one rank and step. ``out``, ``back``: between device and host; ``touched``: of host memory by the CPU's
    update; ``read``, ``written``: of files."""

    out: int
    back: int
    touched: int
    read: int
    written: int


def host_state(
    buffers: Sequence[Buffer], stage: int, precision: str, grad_dtype: str, offload: Offload, gpu: bool
) -> HostState:
    """What a rank keeps of ``buffers`` off its device, in bytes of storage, padding included."""
    parameters = gradients = state = files = record = 0
    leaving = leaving_buffers(buffers, offload)
    plain = leaving and offload.plain
    for index, buffer in enumerate(buffers):
        numel, away = owned_elements(buffer, stage), values_leave(buffer, stage, offload)
        parameters += numel * BYTES[precision] * away
        if index not in leaving:
            continue
        gradients += numel * BYTES[grad_dtype]
        if plain:
            state += numel * (8 if precision == "fp32" and away else 12)
            continue
        fields = stored_fields(offload, away)
        if offload.optimizer == "nvme":
            sizes = [record_places(fields, min(offload.buffer_size, numel - at))[1] for at in _pieces(numel, offload)]
            files, record = files + sum(sizes), max(record, *sizes)
        else:
            state += numel * sum(dtype.itemsize for dtype in fields.values())
    work = offload.buffer_count * record
    if leaving:
        work += _scratch(offload, precision) + (offload.buffer_count * offload.buffer_size * 4 if gpu else 0)
    return HostState(parameters, gradients, state, files, work)


def _pieces(numel: int, offload: Offload) -> range:
    return range(0, numel, offload.buffer_size)


def _scratch(offload: Offload, precision: str) -> int:
    """Room for a piece's float32 gradient, for what is stored otherwise, and the bits that round at random."""
    pieces = 1 + 2 * (offload.moments == "bf16") + (offload.masters != "fp32")
    noise = "bf16" in (offload.moments, offload.masters)
    return 4 * (pieces * offload.buffer_size + noise * (offload.buffer_size + OFFSETS))


def moved(
    buffers: Sequence[Buffer], stage: int, precision: str, grad_dtype: str, offload: Offload, passes: int
) -> Moved:
    """``passes``: micro-batches of a step. Parameters off the device are fetched for every forward and backward.

    Where gradients are cut (stages 2 and 3) every micro-batch's leave, and come back for the next to be added.
    """
    out = back = touched = files = 0
    leaving, reductions = leaving_buffers(buffers, offload), passes if stage >= 2 else 1
    for index, buffer in enumerate(buffers):
        numel, away = owned_elements(buffer, stage), values_leave(buffer, stage, offload)
        if away:
            back += 2 * passes * numel * BYTES[precision]
        if index not in leaving:
            continue
        grad, value = BYTES[grad_dtype], BYTES[precision]
        out += reductions * numel * grad
        back += (reductions - 1) * numel * grad + (0 if away else numel * value)
        stored = sum(dtype.itemsize for dtype in stored_fields(offload, away).values())
        touched += numel * (2 * stored + grad + 2 * value)
        if offload.optimizer == "nvme":
            files += numel * stored
    return Moved(out, back, touched, files, files)


@dataclass(frozen=True)
class HostSeconds:
    """Seconds per step of one rank if nothing else ran. ``gradients``, ``parameters``: on the link between device and
    host, per micro-batch; ``update``: the CPU's AdamW on host memory; ``values``: new parameters back; ``files``."""

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


def host_seconds(config: Config, buffers: Sequence[Buffer], precision: str, host: Host) -> HostSeconds:
    """On machines of one kind; ``host``: a GPU's share of one."""
    stage, grads, offload = config.zero.stage, config.train.grad_dtype, Offload.of(config.zero)
    one = moved(buffers, stage, precision, grads, offload, passes=1)
    fetched = sum(
        owned_elements(buffer, stage) * BYTES[precision] for buffer in buffers if values_leave(buffer, stage, offload)
    )
    both = max(one.read, one.written) if offload.pipeline_read and offload.pipeline_write else one.read + one.written
    return HostSeconds(
        gradients=one.out / host.link,
        parameters=fetched / host.link,
        update=one.touched / host.bandwidth,
        values=(one.back - 2 * fetched) / host.link,
        files=both / host.disk,
    )
