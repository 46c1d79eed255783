"""A number for a tensor's bits, to see whether somebody has changed them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_COLUMNS, _ROWS = 1 << 12, 1 << 10
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd: multiplying by it loses nothing


def fingerprints(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(number of tensors,) int64 on the host: the same for the same bits, on whatever device, another one for others
    but for a chance of about 1e-10. At most 32 MiB beside the tensors."""
    weights = torch.randint(-(2**62), 2**62, (_COLUMNS,), generator=torch.Generator().manual_seed(1))
    weights = 2 * weights + 1
    weights_on = {device: weights.to(device) for device in {tensor.device for tensor in tensors}}
    found = torch.zeros(len(tensors), dtype=torch.int64)
    for i, tensor in enumerate(tensors):
        found[i] = _fingerprint(tensor, weights_on[tensor.device])
    return found


def _fingerprint(tensor: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().view(-1)
    # At most 32 bits at a time: a sum modulo 2**64 sees of a 64-bit number's highest bit only how often it changed.
    narrow = {1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32)
    bits = flat.view(narrow)
    result = torch.zeros((), dtype=torch.int64, device=flat.device)
    for chunk in bits.split(_COLUMNS * _ROWS):
        rows = chunk.numel() // _COLUMNS
        full, rest = chunk[: rows * _COLUMNS].view(rows, _COLUMNS), chunk[rows * _COLUMNS :]
        sums = (full.to(torch.int64) * weights).sum(dim=1)
        result = result * _MULTIPLIER + (sums * weights[:rows]).sum()
        result = result * _MULTIPLIER + (rest.to(torch.int64) * weights[: rest.numel()]).sum()
    return result
