"""Settings of a run that goes on which are not those that it was saved with: what makes another model of it, and what
may change and is worth a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megazero.checkpoint import Checkpoint
from megazero.checkpoint.manifest import within
from megazero.config import Config
from megazero.config_cli import fields, written
from megazero.convert import model_of
from megazero.errors import CheckpointError
from megazero.models.config import ModelConfig
from megazero.models.parameters import parameter_shapes

ORDER = ("train", "split", "seq_length", "shuffle", "seed")
"""Of the data section: what decides which tokens the sample at a position holds."""
_FREE = ("model.dropout", "model.attention_dropout")
"""What any weights go with."""
_OF_TRAINING = {
    "data": (*ORDER, "reset_at_document", "mask_eod", "eod_id"),
    "train": (
        "steps",
        "global_batch_size",
        "rampup_batch_size",
        "precision",
        "grad_dtype",
        "loss_scale_window",
        "min_loss_scale",
    ),
}
"""Of each section; where it runs, how it is cut and what it logs changes no training. The optimizer's all do."""


class Change(NamedTuple):
    """``field``: as a user types it."""

    field: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.field} = {written(self.now)} (was {written(self.saved)})"


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    """Of two trees of settings. What the first has nothing of, not even that it was unset, is not compared."""
    for field, _ in fields(Config):
        section, name, *_ = path = field.split(".")
        recorded = saved.get(section)
        before, after = within(saved, *path), within(now, *path)
        if isinstance(recorded, dict) and name in recorded and before != after:
            yield Change(field, before, after)


def _settled(model: ModelConfig) -> dict[str, Any]:
    """With a number where unset means one that follows from others."""
    return model.model_dump(mode="json") | {
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "ffn_hidden_size": model.ffn_size,
        "attention_dropout": model.attention_dropout_rate,
    }


def _model_changes(checkpoint: Checkpoint, model: ModelConfig) -> list[Change]:
    """Of the architecture, without what only follows from another change, or is of initial weights alone; nothing where
    the checkpoint does not say what it was."""
    try:
        saved = model_of(checkpoint)
    except CheckpointError:
        return []
    given = _changes({"model": saved.model_dump(mode="json")}, {"model": model.model_dump(mode="json")})
    named = {change.field for change in given} - {"model.init_std"}
    settled = _changes({"model": _settled(saved)}, {"model": _settled(model)})
    return [change for change in settled if change.field in named]


def check_model(checkpoint: Checkpoint, config: Config) -> None:
    """CheckpointError, with the settings that make another model of it, unless its parameters are those of the run's.

    Raised before any state is touched.
    """
    model = config.model.architecture
    try:
        checkpoint.check_matches(parameter_shapes(model))
    except CheckpointError:
        found = [change for change in _model_changes(checkpoint, model) if change.field not in _FREE]
        if not found:
            raise
        told, those = ", ".join(map(str, found)), "it" if len(found) == 1 else "them"
        place = "checkpoint.dir" if config.checkpoint.resume == "auto" else "checkpoint.resume"
        raise CheckpointError(
            f"{checkpoint.path}: is of another model: {told}. Set {those} back, or choose another {place}"
        ) from None


def training_changes(checkpoint: Checkpoint, config: Config, step: int, samples: int) -> Iterator[str]:
    """A line where a run that goes on after ``step``, at position ``samples`` of the sample order, is not trained as it
    was before."""
    saved, now = checkpoint.meta["config"], config.model_dump(mode="json")
    changes = _model_changes(checkpoint, config.model.architecture)
    for change in _changes(saved, now):
        section, name, *_ = change.field.split(".")
        if section == "optimizer" or name in _OF_TRAINING.get(section, ()):
            changes.append(change)
    told = [f"settings changed since step {step}: {', '.join(map(str, changes))}"] if changes else []
    if any(saved["data"].get(name) != now["data"][name] for name in ORDER):
        told.append(f"the run goes on at sample {samples} of another order")
    if told:
        yield "; ".join(told)
