"""The engine's checkpoints: in the format of the trainer's, so that any number of ranks at any stage loads any other.

meta of the manifest: ``engine`` (the stage that saved), ``counters``, ``optimizer``, ``lr_scheduler``, ``loss_scale``,
``excluded`` (frozen parameters that are not in it), ``tied`` (further names of shared parameters), ``client_state``.
Buffers are in rank 0's own state, those of a pipeline's
stage in that of its first rank. [Note: all or nothing] of megazero.restore holds here as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from megazero.checkpoint import Checkpoint, ChunkData, Group, OneProcess, TorchGroup, locate, manifest, raise_together
from megazero.checkpoint.background import BackgroundSaver
from megazero.checkpoint.files import DTYPE_NAMES
from megazero.checkpoint.reader import differences
from megazero.checkpoint.rng import rng_state, set_rng_state
from megazero.checkpoint.store_group import StoreGroup
from megazero.checkpoint.tagged import check_tag
from megazero.errors import CheckpointError, MegazeroError
from megazero.foreign.optimizer_state import (
    check_optimizer,
    chunk_parts,
    group_of,
    joined_meta,
    load_optimizer,
    optimizer_boxes,
    optimizer_chunks,
    optimizer_meta,
    optimizer_tensors,
)
from megazero.foreign.plain_values import check_json, decode, encode
from megazero.foreign.recover import WriterWithScript
from megazero.foreign.shared_state import BUFFER, shared_shapes, shared_state
from megazero.resilience.signals import LateFlags
from megazero.sharding import Rectangle, is_counted
from megazero.zero.block import Block, Reader

if TYPE_CHECKING:
    from megazero.foreign.engine import ZeroEngine

T = TypeVar("T")

TIMEOUT = 1800
"""Seconds that a save in the background waits for a rank."""


class EngineCheckpoints:
    """Saves and loads of one engine; made on every rank together."""

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = engine
        self._group: Group = TorchGroup() if engine.world_size > 1 else OneProcess()
        self._saver: BackgroundSaver | None = None
        self._alarms = LateFlags(engine.device)
        if engine.ds_config.checkpoint.async_save:
            self._saver = BackgroundSaver(engine.device)
            self._saver_group = StoreGroup.beside(self._group, TIMEOUT)

    # Saving

    def save(
        self,
        save_dir: str | Path,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        save_latest: bool,
        exclude_frozen: bool,
    ) -> None:
        engine = self._engine
        self.wait()
        engine.raise_if_diverged()
        tag = self._agreed(tag)
        step, root = engine.global_steps, Path(save_dir)
        meta = self._joined(self._together(lambda: self._meta(client_state, exclude_frozen)))
        state = self._together(self._rank_state)
        writer = WriterWithScript(root, self._group if self._saver is None else self._saver_group)
        if any(block.gradient.present for block in engine.sharded.trained):
            self._say(f"saving {root / tag} between accumulation boundaries: the gradients so far are not in it")

        def write(chunks: Any, rank_state: Mapping[str, torch.Tensor]) -> Path:
            return writer.save_as(tag, save_latest, step, chunks, rank_state, meta)

        chunks = self._chunks(exclude_frozen)
        if self._saver is None:
            write(chunks, state)
        else:
            self._saver.save(write, chunks, state, root / tag)
            # The user may write to parameters at any time from here on.
            self._saver.release()

    def _agreed(self, tag: str | None) -> str:
        """Rank 0's tag; what happens where others differ is checkpoint.tag_validation's to say."""
        layout, validation = self._engine.topology.layout, self._engine.ds_config.checkpoint.tag_validation
        if layout.tp * layout.pp > self._engine.num_stages:
            raise MegazeroError(
                f"save_checkpoint: with tp {layout.tp} and pp {layout.pp} in the topology, which part of the model a "
                "parameter is is not known here; save engine.module's own way, or use data-parallel processes only"
            )
        tags = self._group.all_gather(f"global_step{self._engine.global_steps}" if tag is None else str(tag))
        if len(set(tags)) > 1:
            told = f"ranks give different tags: {', '.join(dict.fromkeys(tags))}"
            if validation == "Fail":
                raise CheckpointError(
                    f"{told}; give the same on every rank, or set checkpoint.tag_validation to Ignore"
                )
            if validation == "Warn":
                self._say(f"{told}; rank 0's is used")
        check_tag(tags[0])
        return tags[0]

    def _meta(self, client_state: Mapping[str, Any] | None, exclude_frozen: bool) -> dict[str, Any]:
        engine, scheduler = self._engine, self._engine.lr_scheduler
        frozen = [block for block in engine.sharded.blocks if not block.trainable] if exclude_frozen else []
        return {
            "engine": {"stage": engine.zero_optimization_stage()},
            "layout": self._layout,
            "consumed_samples": engine.global_samples,
            "counters": {
                "global_steps": engine.global_steps,
                "micro_steps": engine.micro_steps,
                "skipped_steps": engine.skipped_steps,
                "global_samples": engine.global_samples,
                "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
            },
            "optimizer": optimizer_meta(engine.shard_optimizer) if engine.shard_optimizer is not None else None,
            "lr_scheduler": _scheduler_meta(scheduler),
            "loss_scale": engine.loss_scaler.state() if engine.loss_scaler.half else None,
            "excluded": [entry.name for block in frozen for entry in block.layout.entries],
            "tied": _tied(engine.module),
            "client_state": check_json(_dict_of(client_state), "client_state"),
        }

    @property
    def _layout(self) -> dict[str, int]:
        stages = self._engine.num_stages
        return {"tp": 1, "pp": stages, "dp": self._engine.world_size // stages}

    def _joined(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Of a pipeline: with what every stage has to say of its own parameters."""
        if self._engine.num_stages == 1:
            return meta
        metas = self._group.all_gather(meta)
        merged = {
            "optimizer": self._together(lambda: joined_meta([part["optimizer"] for part in metas])),
            "excluded": sorted({name for part in metas for name in part["excluded"]}),
            "tied": {name: first for part in metas for name, first in part["tied"].items()},
        }
        return {**meta, **merged}

    def _of_all_stages(self, own: dict[str, Any]) -> dict[str, Any]:
        if self._engine.num_stages == 1:
            return own
        return {name: value for part in self._group.all_gather(own) for name, value in part.items()}

    def _rank_state(self) -> dict[str, torch.Tensor]:
        engine = self._engine
        state = rng_state(engine.device)
        whole = optimizer_tensors(engine.shard_optimizer) if engine.shard_optimizer is not None else {}
        if self._group.rank > 0 and (engine.num_stages == 1 or engine.topology.coordinates["dp"] > 0):
            return state
        for name, buffer in _buffers(engine.module).items():
            if buffer.dtype not in DTYPE_NAMES or buffer.layout is not torch.strided:
                raise CheckpointError(
                    f"buffer {name}: {buffer.dtype}, {buffer.layout} has no place in a safetensors file; register it "
                    "with persistent=False, or in another dtype"
                )
            state[BUFFER + name] = buffer
        return state | whole

    def _chunks(self, exclude_frozen: bool) -> Iterator[ChunkData]:
        """This rank's slice of the weights and of what the optimizer keeps; of a tied layer the first stage's."""
        sharded, coordinates = self._engine.sharded, self._engine.topology.coordinates
        if sharded.groups.replicate.rank > 0:
            return
        for block in sharded.blocks:
            if exclude_frozen and not block.trainable:
                continue
            for piece, box, values in block.chunks("weight"):
                if is_counted(piece, coordinates):
                    yield from chunk_parts("weight", piece, box, values)
            for entry in block.layout.entries if sharded.groups.shard.rank == 0 else ():
                if not entry.spec.numel:  # only its shape is told
                    empty = torch.empty(entry.spec.local_shape)
                    box = Rectangle((0,) * empty.dim(), entry.spec.local_shape)
                    yield ChunkData("weight", entry.name, box, entry.spec.local_shape, empty)
        if self._engine.shard_optimizer is not None:
            yield from optimizer_chunks(self._engine.shard_optimizer, coordinates)

    # Saves in the background

    def wait(self) -> None:
        """Returns when no save is under way; the error of one that failed is raised here, on every rank."""
        if self._saver is not None:
            self._saver.wait()

    def alarm(self) -> list[torch.Tensor]:
        """What this rank has to tell the others at a step: a scalar to be summed, or nothing."""
        if self._saver is None:
            return []
        return [torch.full((), float(self._saver.failed), dtype=torch.float64, device=self._engine.device)]

    def heard(self, alarms: list[torch.Tensor]) -> None:
        """The sums: where a save has failed, its error, on every rank after the same step."""
        for flag in alarms:
            self._alarms.note(flag)
        if self._alarms.up():
            self.wait()

    # Loading

    def load(
        self,
        load_dir: str | Path,
        tag: str | None,
        strict: bool,
        with_optimizer: bool,
        with_scheduler: bool,
        module_only: bool,
    ) -> tuple[str | None, dict[str, Any]]:
        self.wait()
        if any(block.holders for block in self._engine.sharded.blocks):
            raise MegazeroError("load_checkpoint: inside `with GatheredParameters(...):`; call it after")
        path = self._find(Path(load_dir), tag)
        if path is None:
            self._say(f"load_checkpoint: {load_dir} holds no checkpoint; nothing is loaded")
            return None, {}
        optimizer, scheduler = with_optimizer and not module_only, with_scheduler and not module_only
        shapes, buffers, groups = map(self._of_all_stages, self._wanted())
        with self._together(lambda: Checkpoint(path)) as checkpoint:

            def checked() -> dict[str, torch.Tensor]:
                told = self._of_another_model(checkpoint, strict, shapes, buffers)
                return self._checked(checkpoint, told, optimizer, scheduler, module_only, groups)

            first = self._together(checked)
            self._load_module(checkpoint, first)
            meta = checkpoint.meta
            if not module_only:
                self._load_progress(checkpoint)
            if optimizer and self._engine.shard_optimizer is not None:
                keep_rates = self._engine.lr_scheduler is not None and not scheduler
                load_optimizer(self._engine.shard_optimizer, checkpoint, meta["optimizer"], first, keep_rates)
            if optimizer and meta["loss_scale"] is not None and self._engine.loss_scaler.dynamic:
                self._engine.loss_scaler.load(meta["loss_scale"])
            if scheduler:
                _load_scheduler(self._engine, meta["lr_scheduler"])
        if meta.get("excluded"):
            self._say(
                f"load_checkpoint: {len(meta['excluded'])} frozen parameters are not in {path} and stay as they are"
            )
        return str(path), meta.get("client_state", {})

    def _find(self, root: Path, tag: str | None) -> Path | None:
        """The checkpoint, as rank 0 sees it."""

        def find() -> Path | None:
            if self._group.rank > 0:
                return None
            if tag is not None:
                check_tag(str(tag))
                return locate.tagged(root, str(tag))
            if (root / manifest.NAME).exists():
                return root
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = locate.latest_tagged(root)
            for warning in caught:
                self._say(str(warning.message))
            return found

        return self._group.all_gather(self._together(find))[0]

    def _checked(
        self,
        checkpoint: Checkpoint,
        told: list[str],
        optimizer: bool,
        scheduler: bool,
        module_only: bool,
        groups: Mapping[str, int],
    ) -> dict[str, torch.Tensor]:
        """Finds every reason not to load, beside those ``told``, and checks all bytes that loading will read; returns
        the state that is of no rank alone. ``groups``: of all stages, parameter → its optimizer group."""
        engine, meta = self._engine, checkpoint.meta
        if "engine" not in meta and not module_only:
            raise CheckpointError(
                f"{checkpoint.path}: was not saved by engine.save_checkpoint; its weights alone can be loaded, with "
                "load_module_only=True"
            )
        fixes = ["Give the model that it was saved with"] if told else []
        # Of another model the parameters in an optimizer's groups are others as well.
        if optimizer and not told and (problem := check_optimizer(meta["optimizer"], engine.shard_optimizer, groups)):
            told.append(problem)
            fixes.append("pass load_optimizer_states=False to go on with a new optimizer")
        if scheduler and (problem := _check_scheduler(meta["lr_scheduler"], engine.lr_scheduler)):
            told.append(problem)
            fixes.append("pass load_lr_scheduler_states=False to start the schedule anew")
        if told:
            raise CheckpointError(
                f"{checkpoint.path}: cannot be loaded: it {'; it '.join(told)}. {', or '.join(fixes)}"
            )
        checkpoint.verify(
            ("weight", piece.name, box)
            for block in engine.sharded.blocks
            for _, piece, box in block.layout.boxes(*block.owned)
            if piece.name in checkpoint.parameters
        )
        if optimizer and engine.shard_optimizer is not None:
            checkpoint.verify(optimizer_boxes(engine.shard_optimizer, checkpoint))
        if self._keeps_rng(checkpoint) and not module_only:
            checkpoint.rank_state(self._group.rank)
        return shared_state(checkpoint)

    def _wanted(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """This rank's parameters and buffers, name → shape, and its trained parameters' optimizer groups."""
        engine = self._engine
        blocks, buffers = engine.sharded.blocks, _buffers(engine.module)
        return (
            {entry.name: entry.spec.local_shape for block in blocks for entry in block.layout.entries},
            {name: tuple(buffer.shape) for name, buffer in buffers.items()},
            group_of(engine.shard_optimizer) if engine.shard_optimizer is not None else {},
        )

    def _of_another_model(
        self, checkpoint: Checkpoint, strict: bool, wanted: Mapping[str, Any], here: Mapping[str, Any]
    ) -> list[str]:
        """``wanted``, ``here``: the parameters and buffers of all stages, name → shape."""
        saved = shared_shapes(checkpoint, BUFFER)
        left_out = set(checkpoint.meta.get("excluded", ()))
        found = checkpoint.parameters
        told = []
        for ours, theirs, what in ((wanted, found, ""), (here, saved, "buffer ")):
            if not strict:
                left_out |= ours.keys() - theirs.keys()
                theirs = {name: shape for name, shape in theirs.items() if name in ours}
            ours = {name: shape for name, shape in ours.items() if name not in left_out or name in theirs}
            told += differences({what + n: s for n, s in theirs.items()}, {what + n: s for n, s in ours.items()})
        return told

    def _keeps_rng(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.world_size == self._group.size and checkpoint.meta.get("layout") == self._layout

    @torch.no_grad()
    def _load_module(self, checkpoint: Checkpoint, first: Mapping[str, torch.Tensor]) -> None:
        sharded = self._engine.sharded
        sharded.rest()
        for block in sharded.blocks:
            block.load("weight", _reader(checkpoint, block))
        sharded.gather()
        for name, buffer in _buffers(self._engine.module).items():
            if BUFFER + name in first:
                buffer.copy_(first[BUFFER + name])

    def _load_progress(self, checkpoint: Checkpoint) -> None:
        engine, counters = self._engine, checkpoint.meta["counters"]
        engine.global_steps, engine.skipped_steps = counters["global_steps"], counters["skipped_steps"]
        engine.global_samples, engine.micro_steps = counters["global_samples"], counters["micro_steps"]
        accumulation = engine.gradient_accumulation_steps()
        if engine.micro_steps % accumulation or accumulation != counters["gradient_accumulation_steps"]:
            # A step starts anew: the gradients of one under way are not saved.
            engine.micro_steps = engine.global_steps * accumulation
        engine.counts_from = 0
        if self._keeps_rng(checkpoint):
            set_rng_state(checkpoint.rank_state(self._group.rank), engine.device)

    def _together(self, work: Callable[[], T]) -> T:
        """``work()``, whose error on any rank is one on all."""
        result: Any = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        raise_together(self._group, error)
        return result

    def _say(self, text: str) -> None:
        if self._group.rank == 0:
            print(f"megazero: {text}", flush=True)


def _reader(checkpoint: Checkpoint, block: Block) -> Reader:
    """Values from the checkpoint; of parameters that it does not have, those that are there."""
    base = block.owned[0]
    kept = {
        (piece.name, box): block.owned_state("weight")[at - base : at - base + box.numel].clone()
        for at, piece, box in block.layout.boxes(*block.owned)
        if piece.name not in checkpoint.parameters
    }

    def read(name: str, shape: tuple[int, ...], box: Rectangle) -> torch.Tensor:
        return kept[name, box] if (name, box) in kept else checkpoint.read("weight", name, box)

    return read


def _buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Those that a state_dict has, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    }


def _dict_of(client_state: Mapping[str, Any] | None) -> dict[str, Any]:
    if client_state is not None and not isinstance(client_state, Mapping):
        raise CheckpointError(f"client_state is a {type(client_state).__name__}; give a dict")
    return dict(client_state or {})


def _tied(module: nn.Module) -> dict[str, str]:
    """Further names of parameters → the name that they are saved under."""
    first = {parameter: name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in every if first[parameter] != name}


def _scheduler_meta(scheduler: Any) -> dict[str, Any] | None:
    if scheduler is None or not hasattr(scheduler, "state_dict"):
        return None
    name = type(scheduler).__name__
    return {"type": name, "state": encode(scheduler.state_dict(), f"the state of lr_scheduler {name}")}


def _check_scheduler(saved: Mapping[str, Any] | None, scheduler: Any) -> str | None:
    before, now = (None if part is None else part["type"] for part in (saved, _scheduler_meta(scheduler)))
    if before == now:
        return None
    return f"has {f'the state of {before}' if before else 'no scheduler'}, and this run uses {now or 'none'}"


def _load_scheduler(engine: ZeroEngine, saved: Mapping[str, Any] | None) -> None:
    if saved is None:
        return
    scheduler = engine.lr_scheduler
    scheduler.load_state_dict(decode(saved["state"]))
    if not hasattr(scheduler, "get_last_lr") or engine.optimizer is None:
        return
    # torch's own leave the rate to the optimizer's state, which may not have been loaded.
    for group, rate in zip(engine.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
