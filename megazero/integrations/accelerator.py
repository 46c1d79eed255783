"""deepspeed.accelerator: the device of this process, under the names that DeepSpeed has for it."""

from __future__ import annotations

import functools
from typing import Any

import torch


class Accelerator:
    """The GPUs that torch sees, or the CPU. What is not here is torch.cuda's, or torch.cpu's, under that name."""

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"
        self._module = getattr(torch, self._name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(self._module, name):
            raise AttributeError(f"megazero stands in for deepspeed's accelerator here, and has no {name} of it")
        return getattr(self._module, name)

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(self.current_device() if self._name == "cuda" else None)

    def current_device(self) -> int:
        return torch.cuda.current_device() if self._name == "cuda" else 0

    def device_count(self) -> int:
        return torch.cuda.device_count() if self._name == "cuda" else 1

    def is_available(self) -> bool:
        return True

    def set_device(self, device_index: int) -> None:
        if self._name == "cuda":
            torch.cuda.set_device(device_index)

    def communication_backend_name(self) -> str:
        return "nccl" if self._name == "cuda" else "gloo"

    def is_synchronized_device(self) -> bool:
        return self._name == "cpu"

    def empty_cache(self) -> None:
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def is_bf16_supported(self) -> bool:
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_allocated(device_index) if self._name == "cuda" else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(device_index) if self._name == "cuda" else 0

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self._name == "cuda":
            torch.cuda.reset_peak_memory_stats(device_index)


@functools.cache
def get_accelerator() -> Accelerator:
    """The one of this process."""
    return Accelerator()
