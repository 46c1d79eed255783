"""Finding where a value stopped being finite, by running the step again with every module watched."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megazero.stage import DecoderStage
from megazero.topology import Topology


class Phase(IntEnum):
    """In which part of a step a value is not finite; the earlier part is the likelier cause."""

    WEIGHTS = 0
    FORWARD = 1
    BACKWARD = 2
    REDUCTION = 3


class Finding(NamedTuple):
    """``order``: how many checks of its phase came before it on its rank."""

    phase: Phase
    order: int
    what: str


class FiniteWatch:
    """Notes the first weight, module output and gradient that is not finite on this rank."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._first: dict[Phase, Finding] = {}
        self._checks = dict.fromkeys(Phase, 0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks on every module and parameter; layers run uncompiled, so that hooks inside them are called."""
        compiled = [(m, m.__dict__.pop("forward")) for m in self.model.modules() if "forward" in m.__dict__]
        hooks = [
            module.register_forward_hook(self._on_output(name or "the stage"))
            for name, module in self.model.named_modules()
        ]
        hooks += [
            parameter.register_hook(partial(self._check, Phase.BACKWARD, f"the gradient of {name}"))
            for name, parameter in self.model.named_parameters()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for module, forward in compiled:
                module.forward = forward

    def _on_output(self, name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            for tensor in output if isinstance(output, tuple) else (output,):
                self._check(Phase.FORWARD, f"the output of {name}", tensor)
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._check, Phase.BACKWARD, f"the gradient at the output of {name}"))

        return hook

    def _check(self, phase: Phase, what: str, tensor: torch.Tensor) -> None:
        self._checks[phase] += 1
        if phase not in self._first and not bool(torch.isfinite(tensor).all()):
            self._first[phase] = Finding(phase, self._checks[phase], what)

    def finding(self, stage: DecoderStage) -> Finding | None:
        """The earliest on this rank, or None where all is finite here. ``stage``: its gradients are looked at too."""
        for block in stage.sharded.blocks:
            cut = block.sharding.parameters
            held, (start, end) = (block.held_values(), block.owned) if cut else (block.flat, (0, block.layout.numel))
            for first, last, piece, _ in block.layout.pieces(start, end):
                self._check(Phase.WEIGHTS, f"the weight {piece.name}", held[first - start : last - start])
        for block in stage.sharded.trained:
            if block.gradient.present:
                grad, base = block.gradient.owned(), block.owned[0]
                for first, last, piece, _ in block.layout.pieces(*block.owned):
                    part = grad[first - base : last - base]
                    self._check(Phase.REDUCTION, f"the reduced gradient of {piece.name}", part)
        return self._first[min(self._first)] if self._first else None


def earliest(finding: Finding | None, topology: Topology) -> str:
    """The earliest finding over all ranks, in words, the same on every rank."""
    findings: list[Finding | None] = [finding]
    if topology.layout.world_size > 1:
        findings = [None] * topology.layout.world_size
        dist.all_gather_object(findings, finding)
    found = [(f, rank) for rank, f in enumerate(findings) if f]
    if not found:
        return "run again, the same step was finite: suspect the hardware of one of the nodes"

    # Forward flows down the layers, gradients up: the earliest along the way is the cause. Ranks of one stage
    # make the same checks in the same order, and what one of them has wrong reaches the others later.
    def place(found: tuple[Finding, int]) -> tuple[int, float, int, int]:
        finding, rank = found
        depth = _depth(finding.what)
        return finding.phase, depth if finding.phase <= Phase.FORWARD else -depth, finding.order, rank

    first, rank = min(found, key=place)
    coordinates = ", ".join(f"{axis} {c}" for axis, c in topology.layout.coordinates(rank).items())
    return f"first in {first.what} on rank {rank} ({coordinates})"


def _depth(what: str) -> float:
    """Where in the model a finding is: a rank may hold stages that are far from each other."""
    layer = re.search(r"\blayers\.(\d+)", what)
    if layer:
        return int(layer[1])
    return -1 if re.search(r"\bembedding\b", what) else math.inf
