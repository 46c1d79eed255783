"""What a rank keeps off its device, the thread that updates it, and the one that hands new values on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch

from megazero.cores import own_cores
from megazero.host_memory import HostMemory, check_host_memory, wait_for_all
from megazero.places import file_system
from megazero.zero.offload.formats import Noise
from megazero.zero.offload.link import Link
from megazero.zero.offload.media import Disk
from megazero.zero.offload.meter import Meter
from megazero.zero.offload.settings import Offload
from megazero.zero.offload.sizes import BlockShare, HostState, host_state
from megazero.zero.offload.values import FileValues, ParameterFile

_IN_MEMORY = ("tmpfs", "ramfs")
"""Types of file systems that have no disk."""
SENDERS = 8
"""The update's threads to one that rounds its results: it passes over five times as much memory."""


class Tier:
    """The host side of one rank.

    [Note: one worker] Updates run one after another in one thread, in the order in which they were asked for, each on
    all of the rank's cores: host memory is what bounds them, and the pieces asked for first are used first. What is
    new goes to the device in a second thread, while the worker is at the next piece: the device reads the masters
    themselves where they are float32 and pinned, else the thread copies them into pinned memory on a few cores.
    """

    def __init__(self, settings: Offload, device: torch.device, planned: HostState) -> None:
        self.settings, self.device, self.planned = settings, device, planned
        self.memory = HostMemory(device)
        self.disk: Disk | None = None
        if settings.optimizer == "nvme":
            assert settings.nvme_path is not None
            ahead, behind = settings.pipeline_read, settings.pipeline_write
            buffers = settings.buffer_count
            record, files = planned.record, planned.files
            self.disk = Disk(settings.nvme_path, self.memory, buffers, record, files, ahead, behind)
        self.link = Link(device, self.memory, settings.buffer_count, settings.buffer_size)
        self.threads = settings.threads or own_cores()
        pinned = settings.pin_memory and settings.pin_parameters
        self.meter = Meter(self.link.bytes, self.threads, own_cores(), pinned, settings.few_bits)
        self.parameter_file: ParameterFile | None = None
        if settings.parameters == "nvme":
            assert settings.parameters_path is not None
            path, size, slots = settings.parameters_path, planned.parameter_files, planned.parameter_slots
            pin, beside = settings.pin_parameters, self.disk.file if self.disk is not None else None
            self.parameter_file = ParameterFile(path, size, slots, self.memory, self.link, self.meter, pin, beside)
        self._worker = ThreadPoolExecutor(1, "offload", self._begin, (self.threads,))
        self._sender = ThreadPoolExecutor(1, "offload_values", self._begin, (-(-self.threads // SENDERS),))
        self._scratch: dict[str, torch.Tensor] = {}
        self.error: BaseException | None = None

    def _begin(self, threads: int) -> None:
        torch.set_grad_enabled(False)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            # Launchers set OMP_NUM_THREADS to 1; this number is of this thread alone.
            torch.set_num_threads(threads)

    def file_values(self, numel: int, dtype: torch.dtype) -> FileValues | None:
        """Room for a block's values in the file of parameters; None where these are in host memory."""
        return None if self.parameter_file is None else FileValues(self.parameter_file, numel, dtype)

    def submit(self, work: Callable[[], None]) -> Future:
        """``work()`` in the worker, after what was asked for before."""
        return self._worker.submit(work)

    def fail(self, error: BaseException) -> None:
        """An update has ended in ``error``: those asked for after it are not to be made, and nothing is to be read."""
        self.error = error
        if self.disk is not None:
            self.disk.fail(error)

    def hand_on(self, work: Callable[[], Any]) -> Future:
        """``work()`` in the thread for new values, after what was asked for before."""
        return self._sender.submit(work)

    def close(self) -> None:
        """Wait for the threads and end them; files are removed."""
        self._worker.shutdown()
        self._sender.shutdown()
        if self.parameter_file is not None:
            self.parameter_file.close()  # its thread issues copies to the last
        self.link.finish()
        if self.disk is not None:
            self.disk.close()

    def notes(self) -> Iterator[str]:
        """What the user should know of how it is kept."""
        moments, masters = self.settings.moments, self.settings.masters
        where = "in host memory"
        if self.disk is not None:
            cache = (
                "bypassing the page cache" if self.disk.file.direct else "through the page cache, as this file system "
            )
            cache += "" if self.disk.file.direct else "knows no direct reads: slower"
            where = f"in {self.disk.file.path}, {cache}"
        if self.parameter_file is not None:
            yield f"offload: parameters in {self.parameter_file.file.path}"
        if self.settings.optimizer != "none":
            yield f"offload: masters ({masters}) and moments ({moments}) {where}, updated by {_counted(self.threads)}"
        files = {"offload_optimizer": self.disk, "offload_param": self.parameter_file}
        for section, kept in files.items():
            kind, mount = file_system(kept.file.directory.resolve()) if kept is not None else ("", "")
            if kind in _IN_MEMORY:
                yield (
                    f"warning: {section}.nvme_path is on {kind} ({mount}), which is host memory: give a directory on a "
                    f"disk, or {section}.device cpu"
                )

    def advice(self) -> str | None:
        """A step has been issued: what the run should be told, once. On a CPU there is nothing to wait for apart."""
        return self.meter.step() if self.device.type == "cuda" else None

    @cached_property
    def noise(self) -> Noise:
        return Noise(self.settings.buffer_size)

    def scratch(self, name: str, numel: int) -> torch.Tensor:
        """float32 room of up to ``buffer_size`` elements, for the worker alone."""
        if name not in self._scratch:
            self._scratch[name] = self.memory.empty(self.settings.buffer_size, torch.float32)
        return self._scratch[name][:numel]


TierMaker = Callable[[Offload, torch.device, Sequence[BlockShare]], Tier]
"""From the settings, the device, and what the rank owns of each block."""


def claim_tier(settings: Offload, device: torch.device, shares: Sequence[BlockShare]) -> Tier:
    """The tier of this process, when all of its machine's have looked whether there is room. Raises ConfigError and
    OffloadError where there is not."""
    planned = host_state(shares, settings, gpu=device.type == "cuda")
    fix = (
        "keep more of it on the device (ratio), choose device nvme, 16-bit moments or masters, or train.grad_dtype "
        "bf16 (docs/offload.md has the sizes)"
    )
    check_host_memory("offload_optimizer.device", planned.memory, fix)
    tier = Tier(settings, device, planned)  # which looks at the room on the disk
    wait_for_all()
    return tier


def _counted(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"
