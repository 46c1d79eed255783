"""Where a run starts from, and how its state goes to and from a checkpoint.

[Note: all or nothing]
Everything a rank will read is checked first, and the ranks agree that it was good; only then is any state touched.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from megazero.changed import check_model, training_changes
from megazero.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    ChunkData,
    Group,
    OneProcess,
    TorchGroup,
    left_out,
    newest,
    newest_or_none,
    open_checkpoint,
    raise_together,
)
from megazero.checkpoint.background import BackgroundSaver
from megazero.checkpoint.locate import DAMAGED, VERIFIED, set_aside, step_directory
from megazero.checkpoint.rng import check_rng_state, rng_state, set_rng_state
from megazero.checkpoint.run_meta import check_run
from megazero.checkpoint.store_group import StoreGroup
from megazero.checkpoint.verifier import Verifier
from megazero.checkpoint.writer import AnyChunk
from megazero.config import Config, with_model
from megazero.convert import CheckpointWeights, Weights, model_of, open_weights
from megazero.errors import CheckpointError, ConfigError, ConvertError
from megazero.models.config import ModelConfig
from megazero.models.init import draw
from megazero.resilience.bad_steps import NOTHING_SEEN
from megazero.sharding import Rectangle, is_counted
from megazero.zero.block import Block, Reader

if TYPE_CHECKING:
    from megazero.engine import Engine

T = TypeVar("T")

# What a checkpoint holds of every block.
KINDS = ("weight", "exp_avg", "exp_avg_sq")


@dataclass
class Start:
    """What a run starts from: a checkpoint to resume, else weights to begin with, else neither.

    ``notes``: what the user should know of how it was found.
    """

    resume: Checkpoint | None = None
    weights: Weights | None = None
    notes: tuple[str, ...] = ()


@dataclass
class Restored:
    """``run_id``: of the metrics. ``in_own_directory``: the state is on disk in checkpoint.dir already. ``changes``: of
    settings, which a run is to say where it begins, and not again where it goes back."""

    run_id: str | None = None
    in_own_directory: bool = False
    messages: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


def _resumed_path(config: Config) -> tuple[Path | None, tuple[str, ...]]:
    """The checkpoint the run continues, None where it starts anew, and which newer ones are not whole.

    Raises CheckpointError.
    """
    where = config.checkpoint.resume
    if where == "auto":
        return _newest_whole(config.checkpoint.dir) if config.checkpoint.dir else (None, ())
    return None if where == "never" else _of_field("checkpoint.resume", newest, where), ()


def _newest_whole(root: str | Path) -> tuple[Path | None, tuple[str, ...]]:
    """The newest whole checkpoint under a root, and which newer ones are not whole. Raises CheckpointError."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = newest_or_none(root)
    return path, tuple(str(warning.message) for warning in caught)


def _of_field(field: str, function: Callable[[str], T], path: str) -> T:
    """``function(path)``, with the setting that gave the path named in its error."""
    try:
        return function(path)
    except (CheckpointError, ConvertError) as error:
        raise type(error)(f"{field}: {error}") from error


def _initial_weights(config: Config) -> Weights:
    path = config.model.init_from
    if not Path(path).is_dir():
        raise ConfigError.single(
            "model.init_from", f"{path} is no directory; give a Hugging Face directory or a megazero checkpoint"
        )
    return _of_field("model.init_from", open_weights, path)


def resolve_model(config: Config, world_size: int | None = None) -> Config:
    """``config`` with the architecture that ``model.init_from`` stands for, and every rule checked again.

    A run that is resumed takes it from its checkpoint: ``init_from`` need not exist any more. Raises ConfigError,
    CheckpointError or ConvertError.
    """
    if config.model.known:
        return config
    resumed, _ = _resumed_path(config)
    if resumed is None:
        return with_model(config, _initial_weights(config).config, world_size=world_size)
    with open_checkpoint(resumed) as checkpoint:
        return with_model(config, model_of(checkpoint), world_size=world_size)


def find_start(config: Config) -> Start:
    """What the run starts from; opens and checks names and shapes, reads no weights."""
    resumed, notes = _resumed_path(config)
    if resumed is not None:
        checkpoint = open_checkpoint(resumed)
        check_model(checkpoint, config)
        check_run(checkpoint)
        return Start(resume=checkpoint, notes=notes)
    if config.model.init_from:
        return Start(weights=_initial_weights(config), notes=notes)
    return Start(notes=notes)


def group_of(engine: Engine) -> Group:
    return TorchGroup() if engine.topology.layout.world_size > 1 else OneProcess()


def load_start(start: Start, engine: Engine) -> Restored:
    """Give every parameter its value, and the optimizer its state where a run is resumed."""
    blocks, group = engine.stage.sharded.blocks, group_of(engine)
    if start.resume is not None:
        takes_older = engine.config.checkpoint.resume == "auto"
        return _resume_newest_good(start.resume, start.notes, engine, group, takes_older)
    if start.weights is not None:
        weights = start.weights
        if isinstance(weights, CheckpointWeights):
            _verify(weights.checkpoint, blocks, ("weight",), group)
        for block in blocks:
            block.load("weight", lambda name, shape, box: weights.read(name, box))
        return Restored(messages=(*start.notes, f"weights from {engine.config.model.init_from}"))
    read = _initial_values(engine.model_config, engine.config.train.seed, engine.device)
    for block in blocks:
        block.load("weight", read)
    return Restored(messages=start.notes)


def load_newest(engine: Engine) -> Restored | None:
    """Go back to the newest good checkpoint in checkpoint.dir; None where there is none. Every rank calls it."""
    group, root = group_of(engine), engine.config.checkpoint.dir
    assert root is not None
    path, error, notes = None, None, ()
    if group.rank == 0:
        try:
            path, notes = _newest_whole(root)
        except CheckpointError as caught:
            error = caught
    raise_together(group, error)
    path, notes = group.all_gather((path, notes))[0]
    if path is None:
        return None
    return _resume_newest_good(_opened(path, group), notes, engine, group, takes_older=True)


def record_left_out(engine: Engine, run_id: str | None) -> Exception | None:
    """Write down, on rank 0, which samples the run leaves out; what went wrong with that. ``run_id``: as the checkpoint
    has it that the run has gone back to."""
    root = engine.config.checkpoint.dir
    try:
        if engine.topology.rank == 0 and root is not None:
            left_out.write(Path(root), run_id, engine.course.left_out)
    except OSError as error:
        return CheckpointError(f"{Path(root) / left_out.NAME}: cannot be written: {error.strerror}")
    return None


def _initial_values(model: ModelConfig, seed: int, device: torch.device) -> Reader:
    """Draws global tensors, one held at a time: a block asks for the boxes of one tensor in a row."""

    @functools.lru_cache(maxsize=1)
    def whole(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return draw(model, name, shape, seed, device)

    def read(name: str, shape: tuple[int, ...], box: Rectangle) -> torch.Tensor:
        return whole(name, shape)[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape, strict=True))]

    return read


def _verify(
    checkpoint: Checkpoint, blocks: list[Block], kinds: tuple[str, ...], group: Group, rank_state: bool = False
) -> None:
    """See [Note: all or nothing]. ``rank_state``: what each rank saved for itself alone will be read too."""
    error: Exception | None = None
    try:
        checkpoint.verify(
            (kind, piece.name, box)
            for kind in kinds
            for block in blocks
            for _, piece, box in block.layout.boxes(*block.owned)
        )
        if rank_state:
            check_rng_state(checkpoint.rank_state(group.rank), checkpoint.path)
    except Exception as caught:
        error = caught
    raise_together(group, error)


def _load(blocks: list[Block], checkpoint: Checkpoint) -> None:
    for kind in KINDS:

        def read(name: str, shape: tuple[int, ...], box: Rectangle, kind: str = kind) -> torch.Tensor:
            return checkpoint.read(kind, name, box)

        for block in blocks:
            block.load(kind, read)


def _opened(path: Path, group: Group) -> Checkpoint:
    """On every rank; an error of one is raised on all."""
    error = None
    try:
        checkpoint = Checkpoint(path)
        check_run(checkpoint)
    except CheckpointError as caught:
        error = caught
    raise_together(group, error)
    return checkpoint


def _resume_newest_good(
    checkpoint: Checkpoint, notes: tuple[str, ...], engine: Engine, group: Group, takes_older: bool
) -> Restored:
    """Resume from this checkpoint, or where its bytes are damaged, and the user has named none, from the next older one
    that is good. The damaged one is set aside under another name: it would be in the way of the run's next save."""
    engine.course.leave_out(_left_out(checkpoint, group))
    while True:
        try:
            return _resume(checkpoint, notes, engine, group)
        except CheckpointError as error:
            if not takes_older:
                raise
            older, further = group.all_gather(_set_aside(checkpoint.path) if group.rank == 0 else (None, ()))[0]
            if older is None:
                raise
            aside = f"{checkpoint.path}{DAMAGED}"
            notes = (*notes, f"passing over a damaged checkpoint: {error}; it is set aside as {aside}", *further)
            checkpoint = _opened(older, group)


def _set_aside(path: Path) -> tuple[Path | None, tuple[str, ...]]:
    """Rename a damaged checkpoint; the newest whole one then, and which others are not."""
    return _newest_whole(path.parent) if set_aside(path) else (None, ())


def _resume(checkpoint: Checkpoint, notes: tuple[str, ...], engine: Engine, group: Group) -> Restored:
    same = checkpoint.meta["layout"] == _layout(engine)
    _verify(checkpoint, engine.stage.sharded.blocks, KINDS, group, rank_state=same)
    _load(engine.stage.sharded.blocks, checkpoint)
    meta, optimizer = checkpoint.meta, engine.optimizer
    engine.step, engine.consumed_samples = meta["step"], engine.course.begin(meta["consumed_samples"])
    optimizer.adam.count.fill_(meta["optimizer_steps"])
    if optimizer.fp16 and meta["loss_scale"] is not None:
        optimizer.loss_scale.fill_(meta["loss_scale"])
        optimizer.good_steps.fill_(meta["loss_scale_good_steps"] or 0)
    if optimizer.bad_steps is not None:
        optimizer.bad_steps.load(meta.get("bad_steps") or NOTHING_SEEN)
    if same:
        set_rng_state(checkpoint.rank_state(engine.topology.rank), engine.device)
    directory = engine.config.checkpoint.dir
    own = directory is not None and checkpoint.path.parent.resolve() == Path(directory).resolve()
    how = "" if same else f", saved by another layout ({_spelled(meta['layout'])})"
    resumed = f"resumed step {engine.step} from {checkpoint.path}{how}"
    changes = training_changes(checkpoint, engine.config, engine.step, engine.consumed_samples)
    return Restored(meta["run_id"], own, (*notes, resumed), tuple(changes))


def _left_out(checkpoint: Checkpoint, group: Group) -> list[range]:
    """What is on record for a run that goes on from this checkpoint, with it and beside it; as rank 0 reads it."""
    found: list[range] = []
    error: Exception | None = None
    if group.rank == 0:
        try:
            found = left_out.decode(checkpoint.meta.get("left_out", []))
            found += left_out.read(checkpoint.path.parent, checkpoint.meta.get("run_id"))  # weights alone have none
        except CheckpointError as caught:
            error = caught
        except (ValueError, TypeError) as caught:
            error = CheckpointError(f"{checkpoint.path}: left_out in its manifest is not as it was written: {caught}")
    raise_together(group, error)
    return group.all_gather(found)[0]


def _layout(engine: Engine) -> dict[str, int]:
    layout = engine.topology.layout
    return {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}


def _spelled(layout: dict[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in layout.items())


class Saves:
    """The checkpoints that one run writes, where it has a place for them.

    ``step``: of the newest checkpoint that is there or under way, -1 for none.
    """

    def __init__(self, engine: Engine, step: int) -> None:
        settings = engine.config.checkpoint
        self._engine, self.step = engine, step
        self._writer: CheckpointWriter | None = None
        self._background: BackgroundSaver | None = None
        self._state: list[ChunkData] = []  # what the background saver copies
        self._verifier: Verifier | None = None
        if settings.dir is None:
            return
        group = group_of(engine)
        if settings.async_save:
            self._background = BackgroundSaver(engine.device)
            self._state = list(_chunks(engine))  # the same tensors all the time
            self._background.reserve(sum(chunk.box.numel for chunk in self._state))
            group = StoreGroup.beside(group, engine.config.train.timeout)
        self._writer = CheckpointWriter(settings.dir, group, settings.keep, engine.step, settings.verify)
        if settings.verify and engine.topology.rank == 0:
            self._verifier = Verifier(self._writer)
            resumed = step_directory(Path(settings.dir), step)
            if step >= 0 and not (resumed / VERIFIED).exists():
                self._verifier.add(resumed)

    @property
    def due(self) -> bool:
        """Whether there is a state to save that is not on disk, nor under way to it."""
        return self._writer is not None and self.step != self._engine.step

    def save(self) -> None:
        """Write the state after the step just taken; in the background where that is set."""
        assert self._writer is not None
        engine, writer, step, meta = self._engine, self._writer, self._engine.step, _meta(self._engine)

        def write(chunks: Iterable[AnyChunk], rank_state: Mapping[str, torch.Tensor]) -> Path:
            return writer.save(step, chunks, rank_state, meta)

        self.wait()
        state = rng_state(engine.device)
        if self._background is None:
            self._say(write(_chunks(engine), state))
        else:
            for block in engine.stage.sharded.blocks:
                block.settle()
            self._background.save(write, self._state, state, step_directory(writer.root, step))
        self.step = step

    def before_update(self) -> None:
        """The optimizer is about to change what a save may still be copying."""
        if self._background is not None:
            self._background.release()

    @property
    def failed(self) -> bool:
        """Whether a save in the background is known, on this rank, to have failed; ``wait`` raises its error."""
        return self._background is not None and self._background.failed

    def report(self) -> None:
        """Say which save has ended since the last call, and which checkpoint was read back."""
        if self._background is not None and (path := self._background.finished()) is not None:
            self._say(path)
        for path, problem in self._verifier.outcomes() if self._verifier is not None else ():
            step = _step_of(path)
            text = f"passing over a damaged checkpoint: {problem}" if problem else f"verified step {step}"
            self._engine.telemetry.event("damaged" if problem else "verified", step, text, path=str(path))

    def wait(self) -> None:
        """Return when no save is under way. Raises CheckpointError on every rank where one has failed."""
        if self._background is not None:
            self._background.wait()
            self.report()

    def close(self, gives_up: Callable[[], bool]) -> None:
        """No save follows. Waits until the last checkpoint is read back, or ``gives_up`` says not to."""
        if self._verifier is not None:
            self._verifier.close(gives_up)
            self.report()

    def _say(self, path: Path) -> None:
        step, fields = _step_of(path), dict[str, Any](path=str(path))
        text = f"saved step {step} in {path.parent}"
        if self._background is not None:
            fields["waited"] = self._background.pause()
            text += f", for which training has waited {fields['waited']:.2g} s"
        self._engine.telemetry.event("save", step, text, **fields)
        if self._verifier is not None:
            self._verifier.add(path)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _meta(engine: Engine) -> dict[str, Any]:
    optimizer = engine.optimizer
    return {
        "model": engine.model_config.model_dump(mode="json"),
        "config": engine.config.model_dump(mode="json"),
        "layout": _layout(engine),
        "step": engine.step,
        "consumed_samples": engine.consumed_samples,
        "left_out": left_out.encode(engine.course.left_out),
        "optimizer_steps": int(optimizer.adam.count),
        "loss_scale": float(optimizer.loss_scale) if optimizer.fp16 else None,
        "loss_scale_good_steps": int(optimizer.good_steps) if optimizer.fp16 else None,
        "bad_steps": optimizer.bad_steps.state() if optimizer.bad_steps is not None else None,
        "run_id": engine.telemetry.run_id,
    }


def _chunks(engine: Engine) -> Iterator[ChunkData]:
    """This rank's slice of every block's state, each element saved by one rank only."""
    if engine.stage.sharded.groups.replicate.rank > 0:
        return
    for kind in KINDS:
        for block in engine.stage.sharded.blocks:
            for piece, box, tensor in block.chunks(kind):
                if is_counted(piece, engine.topology.coordinates):
                    yield ChunkData(kind, piece.name, box, piece.global_shape, tensor)
