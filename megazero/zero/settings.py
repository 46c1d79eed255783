"""What ZeRO is asked for: the stage, sizes, and what is kept off the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megazero.zero.offload.settings import Offload


@dataclass(frozen=True)
class ZeroSettings:
    """``stage`` and sizes in elements; see config_tree.ZeroSection. ``keep_gathered``: parameters stay whole from their
    first use in a step to its last, over all its micro-batches. ``overlap``: backward goes on while a bucket is
    reduced. ``offload``: what is kept off the device."""

    stage: int
    reduce_bucket_size: int
    allgather_bucket_size: int
    prefetch_bucket_size: int
    persistence_threshold: int
    max_live_parameters: int
    reshard_after_forward: bool = True
    keep_gathered: bool = False
    overlap: bool = True
    offload: Offload = Offload()

    @staticmethod
    def of(zero: Any, **switches: bool) -> ZeroSettings:
        """Of a section that has DeepSpeed's names for the stage and the sizes: config.zero, or a ds_config's."""
        return ZeroSettings(
            zero.stage,
            zero.reduce_bucket_size,
            zero.allgather_bucket_size,
            zero.stage3_prefetch_bucket_size,
            zero.stage3_param_persistence_threshold,
            zero.stage3_max_live_parameters,
            offload=Offload.of(zero),
            **switches,
        )
