"""What a GPU could do at best: the number that MFU is held against."""

from __future__ import annotations

import torch

# Dense 16-bit tensor-core FLOP/s from the makers' data sheets; the first name that the device's name contains.
_HALF_PRECISION_PEAKS: tuple[tuple[str, float], ...] = (
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("RTX 4090", 165e12),
    ("MI300X", 1307e12),
)


def peak_flops(device_name: str, precision: str) -> float | None:
    """The chip's dense peak in FLOP/s for ``precision`` (bf16, fp16, fp32); None where it is not known.

    fp32 has none: whether its products run as TF32 is torch's choice, and the two peaks are far apart.
    """
    if precision == "fp32":
        return None
    return next((peak for name, peak in _HALF_PRECISION_PEAKS if name in device_name), None)


def device_peak_flops(device: torch.device, precision: str) -> float | None:
    """``peak_flops`` of a torch device; None on a CPU."""
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), precision)
