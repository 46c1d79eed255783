"""Host memory that the device copies from and to at full speed."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from pathlib import Path

import torch
import torch.distributed as dist

from megazero.errors import ConfigError, OffloadError

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)

_WIPE_ON_FORK = 18
"""MADV_WIPEONFORK, which mmap has no name for."""


class HostMemory:
    """Takes host memory for one rank. ``taken``, ``pinned``: bytes of all that is alive.

    [Note: exact pages]
    Torch's pinned allocator rounds every tensor up to a power of two, which is up to half of the memory for nothing.
    Here each tensor is an anonymous mapping of its own, registered with CUDA once where it is to be pinned. Only what
    the device copies from or to is: moments are never, and masters where the device reads new values from them. It is
    private, as kernels give huge pages to shared ones only where they were set up to, and they make an update a quarter
    faster. It is written to at once, so that whoever looks at what is available sees that it is taken. A forked child
    (a dataset's worker) finds zeros in its place: else every page that this process changes would be there twice.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.taken = self.pinned = 0

    def empty(self, numel: int, dtype: torch.dtype, pin: bool = False) -> torch.Tensor:
        """A tensor of zeros."""
        size = numel * dtype.itemsize
        if not size:
            return torch.empty(0, dtype=dtype)
        try:
            pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise OffloadError(f"no {size} bytes of host memory are to be had: {error}") from error
        with contextlib.suppress(OSError):
            pages.madvise(_WIPE_ON_FORK)
        if size >= 2**22 and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                pages.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(pages, dtype=dtype)
        pin = pin and self._cuda
        if pin:
            _register(tensor)
        else:
            tensor.view(torch.uint8)[:: mmap.PAGESIZE].zero_()
        self.taken += size
        self.pinned += size if pin else 0
        given = weakref.finalize(tensor.untyped_storage(), _let_go, weakref.ref(self), tensor.data_ptr(), size, pin)
        given.atexit = False  # the process's end gives all back, and CUDA may be gone by then
        return tensor


def _register(tensor: torch.Tensor) -> None:
    status = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    if int(status):
        raise OffloadError(
            f"CUDA cannot pin {tensor.nbytes} bytes of host memory (error {int(status)}); raise the limit of locked "
            "memory (ulimit -l), or set pin_memory of offload to false, which is slower, or checkpoint.async_save"
        )


def _let_go(memory: weakref.ref[HostMemory], address: int, size: int, pinned: bool) -> None:
    if pinned:
        torch.cuda.cudart().cudaHostUnregister(address)
    owner = memory()
    if owner is not None:
        owner.taken -= size
        owner.pinned -= size if pinned else 0


def available_host_memory() -> int:
    """Bytes that this machine's processes can still take: the kernel's estimate, less where a container has a limit."""
    free = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    for limit, usage, stat in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):
            allowed = int(Path(limit).read_text())  # "max" where there is none
            fields = dict(line.split() for line in Path(stat).read_text().splitlines())
            cache = int(fields.get("inactive_file", 0))  # what the kernel drops when asked for memory
            free = min(free, allowed - int(Path(usage).read_text()) + cache)
    return max(0, free)


def wait_for_all() -> None:
    """Return when every process has come here: none takes memory while another still looks at what is available. By the
    store of the process group, as there may be no other group yet."""
    if not dist.is_initialized():
        return
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    turn = f"megazero/offload/{store.add(f'megazero/offload/made/{rank}', 1)}"
    if store.add(turn, 1) == dist.get_world_size():
        store.set(f"{turn}/all", "")
    store.wait([f"{turn}/all"])


def check_host_memory(field: str, needed: int, fix: str, limit: int | None = None) -> None:
    """Raises ConfigError where ``needed`` bytes on each rank are more than the machine has for all of its ranks.

    ``fix``: what the user may do then. ``limit``: bytes for all of them; None: what is available now.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    limit = available_host_memory() if limit is None else limit
    if needed * ranks > limit:
        raise ConfigError.single(
            field,
            f"{needed * ranks / 1e9:.1f} GB of host memory are needed on this machine ({ranks} x "
            f"{needed / 1e9:.1f} GB), and {limit / 1e9:.1f} GB are available; {fix}",
        )
