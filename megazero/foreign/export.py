"""Whole weights out of an engine, without optimizer state: on the first rank alone, the others holding a block."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megazero.checkpoint import OneProcess, TorchGroup, raise_together
from megazero.checkpoint.files import DTYPE_NAMES, Entry, make_directory, sync_directory, write_safetensors
from megazero.errors import MegazeroError
from megazero.zero.homes import InEngine, home_of
from megazero.zero.sharded import ShardedModel

if TYPE_CHECKING:
    from megazero.foreign.engine import ZeroEngine

_GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


class WeightExport:
    """The engine's methods for weights in the dtype the model computes with. Every rank calls them."""

    def save_16bit_model(
        self: ZeroEngine,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write what ``module.state_dict()`` would hold to one file, whole or not at all; returns True.

        By torch.save; a name in .safetensors gives that format, written block by block, so that no rank holds the
        model. At stage 3 the config has to allow it. Raises MegazeroError, the same on every rank.
        """
        if self.sharded.sharding.parameters and not self.zero_gather_16bit_weights_on_model_save():
            raise MegazeroError(
                f"save_16bit_model: {_GATHER} is false, so whole weights are not to be gathered; set it to true, or "
                "call save_checkpoint and convert that with tools/consolidate_checkpoint.py"
            )
        self._adopt_edits()
        path = Path(save_dir) / save_filename
        group = TorchGroup() if self.world_size > 1 else OneProcess()
        write = _write_safetensors if path.suffix == ".safetensors" else _write_pickle
        problem: Exception | None = None
        entries = _entries(self.module, exclude_frozen_parameters)
        values = _values(self.sharded, entries)
        with contextlib.closing(values):
            try:
                if group.rank == 0:
                    with _new_file(path) as scratch:
                        write(scratch, entries, values)
            except (OSError, MegazeroError) as error:
                problem = error
            for _ in values:  # the other ranks, and what a failed write has left, take part to the end
                pass
        raise_together(group, problem)
        return True

    def module_state_dict(self: ZeroEngine, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """``module.state_dict()``; gathered at stage 3, whole on the first rank's CPU and empty on the others."""
        if not self.sharded.sharding.parameters:
            entries = _entries(self.module, exclude_frozen_parameters)
            return {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in entries.items()}
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters) or {}

    def _zero3_consolidated_16bit_state_dict(
        self: ZeroEngine, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """The name by which accelerate and transformers ask for it; None on ranks other than the first."""
        self._adopt_edits()
        entries = _entries(self.module, exclude_frozen_parameters)
        copies = {}
        for parameter, value in _values(self.sharded, entries):
            if self.global_rank == 0:
                copies[parameter] = value.to("cpu", copy=True)
        return _filled(entries, copies) if self.global_rank == 0 else None

    def zero_gather_16bit_weights_on_model_save(self: ZeroEngine) -> bool:
        return self.ds_config.zero.stage3_gather_16bit_weights_on_model_save


def _entries(module: nn.Module, exclude_frozen: bool) -> dict[str, Any]:
    """The module's own state_dict, with the parameters themselves."""
    found = module.state_dict(keep_vars=True)
    frozen = {p for p in module.parameters() if not p.requires_grad} if exclude_frozen else set()
    return {name: x for name, x in found.items() if not (isinstance(x, nn.Parameter) and x in frozen)}


@torch.no_grad()
def _values(sharded: ShardedModel, entries: dict[str, Any]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Each parameter among the entries, once, and its whole values, there until the next is asked for."""
    wanted = {x for x in entries.values() if isinstance(x, nn.Parameter) and isinstance(home_of(x), InEngine)}
    for index in _in_order(sharded):
        block = sharded.blocks[index]
        own = [parameter for parameter in block.parameters if parameter in wanted]
        if not own:
            continue
        sharded.hold([index], f"the weights of {block.layout.name}, to save them")
        try:
            for parameter in own:
                yield parameter, parameter.detach()
        finally:
            sharded.let_go([index])


def _in_order(sharded: ShardedModel) -> list[int]:
    """Blocks by falling element size: in a safetensors file every tensor is aligned then."""
    return sorted(range(len(sharded.blocks)), key=lambda i: -sharded.blocks[i].flat.itemsize)


def _filled(entries: dict[str, Any], values: dict[nn.Parameter, torch.Tensor]) -> dict[str, Any]:
    def value(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return values[x] if x in values else x.detach().cpu()
        return x

    return {name: value(x) for name, x in entries.items()}


def _write_pickle(path: Path, entries: dict[str, Any], values: Iterator[tuple[nn.Parameter, torch.Tensor]]) -> None:
    copies = {parameter: value.to("cpu", copy=True) for parameter, value in values}
    with open(path, "xb") as file:
        torch.save(_filled(entries, copies), file)
        file.flush()
        os.fsync(file.fileno())


def _write_safetensors(
    path: Path, entries: dict[str, Any], values: Iterator[tuple[nn.Parameter, torch.Tensor]]
) -> None:
    """Tied parameters under their first name, as the format wants it."""
    names: dict[torch.Tensor, str] = {}
    for name, x in entries.items():
        if not isinstance(x, torch.Tensor) or x.dtype not in DTYPE_NAMES:
            raise MegazeroError(f"{name} has no place in a safetensors file; save to a name that ends in .bin")
        names.setdefault(x, name)
    sharded = {x for x in names if isinstance(home_of(x), InEngine)}

    def next_value(parameter: nn.Parameter) -> torch.Tensor:
        given, value = next(values)
        assert given is parameter
        return value

    found = []
    # The order that the values come in: by blocks, and in a block by place.
    homes = {x: home_of(x) for x in sharded}
    rank = {index: i for i, index in enumerate(_in_order(next(iter(homes.values())).sharded))} if homes else {}
    for x in sorted(sharded, key=lambda x: (rank[homes[x].index], homes[x].block.index_of(x))):
        found.append(Entry(names[x], x.dtype, tuple(x.shape), lambda x=x: next_value(x)))
    found += [Entry(name, x.dtype, tuple(x.shape), x.detach()) for x, name in names.items() if x not in sharded]
    found.sort(key=lambda entry: -entry.dtype.itemsize)
    write_safetensors(path, found)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """A scratch file beside ``path``, which takes its name when the block ends well and is removed when not."""
    make_directory(path.parent)
    scratch = path.with_name(f".{path.name}.saving")
    with contextlib.suppress(FileNotFoundError):
        scratch.unlink()
    try:
        yield scratch
        os.replace(scratch, path)
        sync_directory(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            scratch.unlink()
