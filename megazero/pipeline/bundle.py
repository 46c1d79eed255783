"""Several tensors that pass from stage to stage together, where a model's stages give more than one."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Bundle:
    """``alone``: they stand for their one tensor by itself. ``trained``: which of them a gradient comes back for.

    Of an activation's bundle the gradient is one of its trained tensors only.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], alone: bool, trained: Sequence[bool]) -> None:
        self.tensors, self.alone, self.trained = tuple(tensors), alone, tuple(trained)

    def differentiable(self) -> list[torch.Tensor]:
        """The trained ones, in order."""
        return [x for x, trained in zip(self.tensors, self.trained, strict=True) if trained]

    def gradient(self) -> Bundle:
        """What backward has left at the trained tensors; zeros where nothing came."""
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in self.differentiable()]
        return Bundle(grads, False, [False] * len(grads))


Payload = torch.Tensor | Bundle
"""What a stage gives the next one, or the gradient of it."""
