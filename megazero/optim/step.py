"""What happens between the last backward and the next forward: reduce, measure, clip, update.

[Note: nothing waits for the host]
Loss, norm, token count and flags stay on the device. An update that must not happen is skipped by a flag that the
kernels read; the host looks at it when it logs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megazero.config_tree import OptimizerSection, TrainSection
from megazero.optim.adamw import AdamW
from megazero.resilience.bad_steps import BadSteps
from megazero.topology import Topology
from megazero.zero.partial import GradientNorm, PartialSums
from megazero.zero.sharded import ShardedModel


class StepSums(NamedTuple):
    """One step's numbers, float64 scalars on the device, the same on every rank.

    loss: mean over the unmasked tokens of the global batch. grad_norm: before clipping. stop: how many ranks want to
    stop. skipped: 1 where the update was not applied.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    stop: torch.Tensor
    skipped: torch.Tensor


class OptimizerStep:
    """Owns AdamW, the loss scale and the flag of a gradient that was not finite."""

    def __init__(
        self,
        sharded: ShardedModel,
        topology: Topology,
        optimizer: OptimizerSection,
        train: TrainSection,
        fp16: bool,
        bad_steps: BadSteps | None = None,
    ) -> None:
        """``bad_steps``: judges each step; without it one that is not finite stops the run."""
        device = topology.device
        self.sharded, self.topology = sharded, topology
        self.clip, self.train, self.fp16 = optimizer.clip_grad_norm, train, fp16
        self.bad_steps = bad_steps
        self.adam = AdamW(sharded, optimizer.betas, optimizer.eps, optimizer.weight_decay, device)
        self.partial = PartialSums(sharded.trained, topology)
        self.norm = GradientNorm(sharded.trained, topology.coordinates, device, sharded.groups.replicate.rank == 0)
        scale = train.initial_loss_scale if fp16 else 1.0
        self.loss_scale = torch.full((), scale, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        # The first step whose gradient was not finite, 0 for none: from then on no update is applied.
        self.bad_step = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def run(self, step: int, lr: float, loss: torch.Tensor, tokens: float, normalizer: int, stop: bool) -> StepSums:
        """Finish step ``step``, whose backwards are done.

        Args:
            loss: this rank's Σ loss / ``normalizer`` × loss scale (float64), zero except on one rank per dp index.
            tokens: unmasked tokens of the same rank and micro-batches, zero elsewhere.
            normalizer: the constant each token's loss was divided by: global_batch_size · seq_length.
        """
        self.sharded.finish_gradients()
        self.partial.sum()
        own = torch.stack(
            (self.norm.squared(), loss, torch.full_like(loss, tokens), torch.full_like(loss, float(stop)))
        )
        if self.topology.world.size > 1:
            self.topology.world.all_reduce([own]).wait()
        squared, loss, tokens_all, stop_all = own.unbind()
        # Every token's loss was divided by a constant; this makes it the mean over those not masked.
        ratio = normalizer / tokens_all.clamp(min=1) / self.loss_scale
        norm = squared.sqrt() * ratio
        clip = (self.clip / (norm + 1e-6)).clamp(max=1.0) if self.clip else torch.ones_like(norm)
        bad = ~torch.isfinite(squared)
        # In fp16 a smaller loss scale may help, as long as there is one.
        fatal = bad & (self.loss_scale <= self.train.min_loss_scale) if self.fp16 else bad
        overflow = bad
        if self.bad_steps is not None:
            bad, fatal = self.bad_steps.judge(step, loss * ratio, bad, fatal)
        self.bad_step = torch.where((self.bad_step == 0) & fatal, float(step), self.bad_step)
        stopped = self.bad_step > 0
        bad, overflow = bad | stopped, overflow | stopped
        skip = bad.float()
        self.adam.step(lr, torch.where(bad, 1.0, ratio * clip), skip)
        if self.fp16:
            window = self.train.loss_scale_window
            torch._amp_update_scale_(self.loss_scale, self.good_steps, overflow.float(), 2.0, 0.5, window)
            self.loss_scale.clamp_(min=self.train.min_loss_scale)
        return StepSums(loss * ratio, norm, stop_all, skip)
