"""What an engine is set to, under the names that DeepSpeed's users ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megazero.foreign.engine import ZeroEngine


class EngineNames:
    """Methods of a ZeroEngine that only tell."""

    def train_batch_size(self: ZeroEngine) -> int:
        return self.ds_config.train_batch_size

    def train_micro_batch_size_per_gpu(self: ZeroEngine) -> int:
        return self.ds_config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self: ZeroEngine) -> int:
        return self.ds_config.gradient_accumulation_steps

    def get_batch_info(self: ZeroEngine) -> tuple[int, int, int]:
        """(samples per step, samples per micro-batch, accumulation steps)"""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def gradient_clipping(self: ZeroEngine) -> float:
        return self.ds_config.gradient_clipping

    def zero_optimization_stage(self: ZeroEngine) -> int:
        return self.sharded.settings.stage

    def zero_optimization(self: ZeroEngine) -> bool:
        return self.sharded.settings.stage > 0

    def fp16_enabled(self: ZeroEngine) -> bool:
        return self.loss_scaler.half

    def bfloat16_enabled(self: ZeroEngine) -> bool:
        return self.ds_config.precision.dtype == torch.bfloat16

    def dynamic_loss_scale(self: ZeroEngine) -> bool:
        return self.loss_scaler.dynamic

    def was_step_applied(self: ZeroEngine) -> bool:
        """Whether the last ``step`` was an update that counts: at a boundary, and not skipped for an overflow."""
        return self._applied

    def get_mom(self: ZeroEngine) -> list[Any]:
        """Of each parameter group: betas, or the momentum where there are none."""
        return [group.get("betas", group.get("momentum")) for group in self._groups()]

    def empty_partition_cache(self: ZeroEngine) -> None:
        """Nothing: stage 3 keeps no parameter whole between passes."""
