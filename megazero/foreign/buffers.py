"""A model's buffers under an engine: on its device, rank 0's, and in which dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megazero.errors import ConfigError, MegazeroError
from megazero.zero.groups import DataParallel

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_SIGNS = ("dtype", "scalar type")
"""What torch says where an operation meets two dtypes has one of these words in it."""


def move_buffers(model: nn.Module, device: torch.device, dp: DataParallel, dtype: torch.dtype | None) -> None:
    """Floating-point ones become ``dtype``, or keep theirs: a rotary frequency in 16 bits would be another one. Shared
    ones stay shared."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for name, module in model.named_modules():
        for own, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                full = f"{name}.{own}" if name else own
                raise ConfigError.single(
                    "model", f"the buffer {full} is on the meta device, without values; load or compute it first"
                )
            if buffer not in moved:
                kept = dtype is None or not buffer.is_floating_point()
                value = buffer.to(device, buffer.dtype if kept else dtype)
                if value.layout is torch.strided:  # a sparse one stays what this rank has made
                    value = value.contiguous()
                    if dp.whole.size > 1 and value.numel():
                        dp.whole.broadcast(value)
                moved[buffer] = value
            setattr(module, own, moved[buffer])


def about_dtypes(model: nn.Module, dtype: torch.dtype, inputs: Any, error: BaseException) -> MegazeroError | None:
    """What to do about an ``error`` of forward, where an input or a buffer of another dtype than the parameters' may be
    its cause; else None.

    Such as a table of positions that is added to activations: models loaded in 16 bits have it in 16 bits.
    """
    if not isinstance(error, RuntimeError) or not any(sign in str(error) for sign in _SIGNS):
        return None
    short = _SHORT[dtype]
    given = [x.dtype for x in tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    other = next((x for x in given if x != dtype), None)
    wide = [name for name, b in model.named_buffers() if b.is_floating_point() and b.dtype.itemsize > dtype.itemsize]
    causes = []
    if other is not None:
        told = ", or set fp16.auto_cast to true" if dtype == torch.float16 else ""
        causes.append(f"an input is {_SHORT.get(other, other)}: cast it, by x.to({dtype}) say{told}")
    if wide:
        first = next((name for name in wide if "inv_freq" not in name), wide[0])
        causes.append(
            f"buffers keep their dtype, {first} for one: if that is meant to be the parameters', set "
            f"data_types.buffer_dtype to {short} in the config (DeepSpeed's default)"
        )
    return MegazeroError(f"forward: {error}. Parameters are {short}; {'; '.join(causes)}") if causes else None
