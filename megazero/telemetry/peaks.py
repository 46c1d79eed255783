"""What a GPU could do at best: the number that MFU is held against. The planner's table of chips owns the figures."""

from __future__ import annotations

import torch

from megazero.planner.chips import chip_of_device


def peak_flops(device_name: str, precision: str) -> float | None:
    """The chip's dense peak in FLOP/s for ``precision`` (bf16, fp16, fp32); None where it is not known.

    fp32 has none: whether its products run as TF32 is torch's choice, and the two peaks are far apart.
    """
    chip = None if precision == "fp32" else chip_of_device(device_name)
    return None if chip is None else chip.peak_flops


def device_peak_flops(device: torch.device, precision: str) -> float | None:
    """``peak_flops`` of a torch device; None on a CPU."""
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), precision)
