"""Transfers between the stages of a model whose shapes nobody knows ahead.

[Note: announced shapes]
Who sends an activation says first what it is: through the process group's store, so that no device is waited for, and
no more than once for training and once for evaluation unless the shapes may change. The receiver's host waits for that
where it would post the receive; that is safe, as every schedule holds where the host waits in the issue of a batch for
the peer's (see schedules, [Note: no deadlock]). A gradient has the shape of what it is of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megazero.errors import LaunchError, MegazeroError
from megazero.pipeline.bundle import Bundle
from megazero.pipeline.p2p import Receipt, Transfers


class AnnouncedTransfers(Transfers):
    """Transfers of Bundles between stages of one chunk each. See [Note: announced shapes].

    ``own``: this pipeline rank. ``changes``: shapes may be others in every micro-batch. ``timeout``: seconds that an
    announcement is waited for.
    """

    def __init__(
        self,
        group: ProcessGroup,
        ranks: Sequence[int],
        own: int,
        device: torch.device,
        pairs: Mapping[int, ProcessGroup],
        changes: bool,
        timeout: float,
    ) -> None:
        super().__init__(group, ranks, (1,), torch.float32, device, pairs)
        self._own, self._changes, self._timeout = own, changes, timedelta(seconds=timeout)
        self._store = dist.distributed_c10d._get_default_store()
        # Each process's n-th pipeline is one: a module after another, or beside it, has keys of its own.
        number = self._store.add(f"megazero/pipe/made/{ranks[own]}", 1)
        self._prefix = f"megazero/pipe/{min(ranks)}-{max(ranks)}/{number}"
        self._told: dict[bool, Any] = {}  # by whether gradients are taken: what was announced last
        self._heard: dict[bool, Any] = {}
        self._announced = self._awaited = 0

    def issue(self, peer: int, sends: Sequence[Bundle], receives: int, outputs: Sequence[Bundle] = ()) -> list[Receipt]:
        """As Transfers.issue. The shapes sent are announced before those to be received are waited for."""
        for bundle in sends if peer > self._own else ():
            self._announce(bundle)
        if peer > self._own:
            bundles = [_like([(x.shape, x.dtype, False) for x in y.differentiable()], self.device) for y in outputs]
        else:
            bundles = [self._expect() for _ in range(receives)]
        sent = [x.detach().contiguous() for bundle in sends for x in bundle.tensors if x.numel()]
        batch = self._start(peer, sent, [x for bundle in bundles for x in bundle.tensors if x.numel()])
        return [Receipt(bundle, peer, batch) for bundle in bundles]

    def wait(self, receipt: Receipt) -> Bundle:
        """The received bundle, whose trained tensors are leaves that take a gradient."""
        bundle = super().wait(receipt)
        for x in bundle.differentiable():
            x.requires_grad_()
        return bundle

    def _announce(self, bundle: Bundle) -> None:
        mode = torch.is_grad_enabled()
        told = [bundle.alone, [[list(x.shape), _name(x), t] for x, t in zip(bundle.tensors, bundle.trained)]]
        before = self._told.setdefault(mode, told)
        if before is not told and before != told and not self._changes:
            raise MegazeroError(
                f"stage {self._own} gave {_described(before)} at first, and gives {_described(told)} now; let every "
                "micro-batch have one shape (dataloader_drop_last), or make the PipelineModule with dynamic_shape=True"
            )
        if before is told or self._changes:
            self._store.set(f"{self._prefix}/{self._own}/{self._announced}", json.dumps(told))
            self._announced += 1

    def _expect(self) -> Bundle:
        mode = torch.is_grad_enabled()
        if self._changes or mode not in self._heard:
            key = f"{self._prefix}/{self._own - 1}/{self._awaited}"
            try:
                self._store.wait([key], self._timeout)
            except RuntimeError as error:  # torch.distributed.DistStoreError among them
                raise LaunchError(
                    f"stage {self._own} waited {self._timeout.total_seconds():g} s for the first tensors of stage "
                    f"{self._own - 1}; every process must make the same calls of train_batch and eval_batch"
                ) from error
            self._heard[mode] = json.loads(self._store.get(key))
            self._store.delete_key(key)
            self._awaited += 1
        alone, tensors = self._heard[mode]
        return _like([(shape, getattr(torch, name), t) for shape, name, t in tensors], self.device, alone)


def _like(
    tensors: Sequence[tuple[Sequence[int], torch.dtype, bool]], device: torch.device, alone: bool = False
) -> Bundle:
    made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, _ in tensors]
    return Bundle(made, alone, [trained for *_, trained in tensors])


def _name(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _described(told: Any) -> str:
    return ", ".join(f"{name} {shape}{'' if trained else ' without gradient'}" for shape, name, trained in told[1])
