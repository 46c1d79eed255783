"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from megazero.config_tree import OptimizerSection


def learning_rate(optimizer: OptimizerSection, step: int, steps: int) -> float:
    """The rate of update ``step`` of ``steps``, counted from 1.

    Linear warm-up reaches ``lr`` at step ``warmup_steps``. Then: cosine and linear reach ``min_lr`` at the last
    step; wsd (warm-up, stable, decay: Hu et al. 2024, arXiv 2404.06395, section 4) stays at ``lr`` and falls linearly
    over the last ``decay_steps``; constant stays.
    """
    lr, low, warmup = optimizer.lr, optimizer.min_lr, optimizer.warmup_steps
    if step < warmup:
        return lr * step / warmup
    if optimizer.schedule == "constant":
        return lr
    start = steps - optimizer.decay_steps if optimizer.schedule == "wsd" else warmup
    if step <= start or steps == start:
        return lr
    progress = min(1.0, (step - start) / (steps - start))
    if optimizer.schedule == "cosine":
        return low + (lr - low) * 0.5 * (1 + math.cos(math.pi * progress))
    return lr + (low - lr) * progress
