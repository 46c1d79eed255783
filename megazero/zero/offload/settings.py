"""What is kept off the device, as the sharding asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Tier = Literal["none", "cpu", "nvme"]
Moments = Literal["fp32", "bf16"]
Masters = Literal["fp32", "split", "bf16"]


@dataclass(frozen=True)
class Offload:
    """``optimizer``, ``parameters``: the tier each is kept in. ``ratio``: the share of the optimizer's state that is
    not kept on the device, in whole blocks. ``nvme_path``, ``parameters_path``: directories of the files of either.
    ``buffer_size``: elements updated at a time; ``buffer_count``: how many of such pieces are on their way at once.
    ``threads``: of the update on one rank; 0: the machine's cores shared out.
    ``moments``, ``masters``: the precisions they are kept in."""

    optimizer: Tier = "none"
    parameters: Tier = "none"
    ratio: float = 1.0
    nvme_path: str | None = None
    parameters_path: str | None = None
    pin_memory: bool = True
    pin_parameters: bool = True
    buffer_count: int = 4
    buffer_size: int = 8 * 2**20
    pipeline_read: bool = True
    pipeline_write: bool = True
    threads: int = 0
    moments: Moments = "fp32"
    masters: Masters = "fp32"

    @staticmethod
    def of(zero: Any) -> Offload:
        """Of a section that has ``offload_optimizer`` and ``offload_param``: config.zero, or a ds_config's."""
        state, parameters = zero.offload_optimizer, zero.offload_param
        return Offload(
            optimizer=state.device,
            parameters=parameters.device,
            ratio=state.ratio,
            nvme_path=state.nvme_path,
            parameters_path=parameters.nvme_path,
            pin_memory=state.pin_memory,
            pin_parameters=parameters.pin_memory,
            buffer_count=state.buffer_count,
            buffer_size=state.buffer_size,
            pipeline_read=state.pipeline_read,
            pipeline_write=state.pipeline_write,
            threads=state.threads,
            moments=state.moments,
            masters=state.masters,
        )

    @property
    def active(self) -> bool:
        return self.optimizer != "none" or self.parameters != "none"

    @property
    def plain(self) -> bool:
        """Whether the state is float32 tensors in host memory."""
        return self.optimizer == "cpu" and self.moments == self.masters == "fp32"

    @property
    def few_bits(self) -> bool:
        """Whether an update changes the form of state, before and after."""
        return self.moments != "fp32" or self.masters != "fp32"

    def sends_masters(self, values_leave: bool) -> bool:
        """Whether new values go to the device as the masters themselves, to be rounded there: it reads these where they
        lie, pinned, and the CPU, whose memory bounds the update, has nothing to do with it. ``values_leave``: new
        values do not go to the device at all."""
        return self.plain and self.pin_memory and not values_leave
