"""From the settings of the data section to what training and evaluation read, all checked before any work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from data.dataset import SampleReader
from data.indexed import IndexedDataset, check_ids
from data.loader import BatchSource
from data.sample_order import SampleOrder
from data.splits import TokenRange, split_at_document
from data.tokenizer import load_tokenizer
from megazero.errors import ConfigError, DataError

_CHECKED_AT_OPEN = 1 << 20
"""Tokens whose ids are checked before work begins; the rest is checked as it is read."""

Blend = str | Sequence[Any]


class DataSettings(Protocol):
    """What build_sources needs of the data section: any object with these attributes.

    ``train`` and ``valid``: a prefix, or (weight, prefix) pairs, also flat: [weight, prefix, weight, prefix].
    """

    train: Blend | None
    valid: Blend | None
    split: tuple[float, float] | None
    seq_length: int
    shuffle: bool
    seed: int
    reset_at_document: bool
    mask_eod: bool
    eod_id: int | None
    tokenizer: str | None


def build_sources(data: DataSettings, *, vocab_size: int | None = None) -> tuple[BatchSource, BatchSource | None]:
    """The training source, and the evaluation source where ``data.valid`` or ``data.split`` asks for one.

    ``vocab_size``: entries of the model's vocabulary; ids must be below it. The evaluation source goes through its
    samples in order and takes whatever is past the last one out of the loss.

    Raises ConfigError for settings that cannot work and DataError for files that cannot be used.
    """
    if data.train is None:
        raise ConfigError.single("data.train", "nothing to train on; give the prefix of a .bin/.idx pair")
    if data.split is not None and data.valid is not None:
        raise ConfigError.single(
            "data.split", "would split data.train, and data.valid is given; leave out one of the two"
        )
    opened: dict[str, IndexedDataset] = {}
    train_weights, train_sets = _open_blend("data.train", data.train, opened)
    valid_weights, valid_sets = _open_blend("data.valid", data.valid, opened) if data.valid is not None else ([], [])
    eod_id = _check_vocabulary(data, [*opened.values()], vocab_size)
    train_parts = [TokenRange.whole(dataset) for dataset in train_sets]
    valid_parts = [TokenRange.whole(dataset) for dataset in valid_sets]
    if data.split is not None:
        valid_weights = train_weights
        halves = [split_at_document(dataset, data.split) for dataset in train_sets]
        train_parts, valid_parts = [half[0] for half in halves], [half[1] for half in halves]

    def source(name: str, parts: list[TokenRange], weights: list[float], evaluation: bool) -> BatchSource:
        _check_enough(name, parts, weights, data)
        shuffle = data.shuffle and not evaluation
        order = SampleOrder([part.num_tokens for part in parts], weights, data.seq_length, data.seed, shuffle)
        reader = SampleReader(
            parts,
            order,
            data.seq_length,
            eod_id=eod_id if data.mask_eod else None,
            reset_at_document=data.reset_at_document,
            vocab_size=vocab_size,
            once=evaluation,
        )
        return BatchSource(reader)

    if data.shuffle:
        for dataset in train_sets:
            dataset.advise_random()
    train = source("train", train_parts, train_weights, False)
    return train, source("valid", valid_parts, valid_weights, True) if valid_parts else None


def _open_blend(
    field: str, blend: Blend, opened: dict[str, IndexedDataset]
) -> tuple[list[float], list[IndexedDataset]]:
    """Weights and datasets of a blend; ``opened`` keeps one per prefix."""
    pairs = _pairs(field, blend)
    for weight, prefix in pairs:
        if not 0 <= weight < math.inf:
            raise ConfigError.single(field, f"weight {weight} of {prefix} must be a number of at least 0")
    if not any(weight for weight, _ in pairs):
        raise ConfigError.single(field, "no dataset has a weight above 0")
    for _, prefix in pairs:
        if prefix not in opened:
            try:
                opened[prefix] = IndexedDataset(prefix)
            except DataError as error:
                raise DataError(f"{field}: {error}") from error
            except OSError as error:
                raise DataError(f"{field}: {error.filename or prefix} cannot be read: {error.strerror}") from error
    return [weight for weight, _ in pairs], [opened[prefix] for _, prefix in pairs]


def _pairs(field: str, blend: Blend) -> list[tuple[float, str]]:
    if isinstance(blend, str):
        return [(1.0, blend)]
    if all(isinstance(part, list | tuple) and len(part) == 2 for part in blend):
        flat: list[Any] = [value for part in blend for value in part]
    else:
        flat = list(blend)
    try:
        return [(float(weight), str(prefix)) for weight, prefix in zip(flat[::2], flat[1::2], strict=True)]
    except (TypeError, ValueError) as error:
        raise ConfigError.single(field, f"{blend!r} is neither a prefix nor weights and prefixes in turn") from error


def _check_vocabulary(data: DataSettings, datasets: list[IndexedDataset], vocab_size: int | None) -> int | None:
    """Check that model, tokenizer and datasets speak of one vocabulary; returns the end-of-document id, if known."""
    eod_ids = {"data.eod_id": data.eod_id}
    sizes: dict[str, int] = {}
    if data.tokenizer is not None:
        try:
            tokenizer = load_tokenizer(data.tokenizer)
        except DataError as error:
            raise DataError(f"data.tokenizer: {error}") from error
        sizes[f"data.tokenizer ({data.tokenizer})"] = tokenizer.vocab_size
        eod_ids["data.tokenizer"] = tokenizer.eod_id
    described = {f"{dataset.prefix}.json": dataset.metadata for dataset in datasets if dataset.metadata}
    sizes |= {name: entry["vocab_size"] for name, entry in described.items() if entry.get("vocab_size") is not None}
    for name, size in sizes.items():
        if vocab_size is not None and size > vocab_size:
            raise DataError(
                f"{name} has a vocabulary of {size} entries, the model one of {vocab_size}; "
                f"set model.vocab_size of a new model to at least {size}, or preprocess with the model's tokenizer"
            )
        if size != next(iter(sizes.values())):
            first = next(iter(sizes))
            raise DataError(
                f"{name} has a vocabulary of {size} entries, {first} one of {sizes[first]}: "
                "they come from different tokenizers; preprocess with one"
            )
    for dataset in datasets:
        first = dataset.tokens[:_CHECKED_AT_OPEN]
        advice = "; set model.vocab_size of a new model higher, or preprocess with the model's tokenizer"
        try:
            check_ids(first, vocab_size, f"{dataset.prefix}.bin")
        except DataError as error:
            raise DataError(f"{error}{advice}") from error
    eod_ids |= {name: entry.get("eod_id") for name, entry in described.items()}
    eod_id = next((eod_id for eod_id in eod_ids.values() if eod_id is not None), None)
    if data.mask_eod and eod_id is None:
        raise ConfigError.single(
            "data.mask_eod", "needs the end-of-document id: give data.eod_id, or a data.tokenizer that has one"
        )
    return eod_id


def _check_enough(name: str, parts: list[TokenRange], weights: list[float], data: DataSettings) -> None:
    """Every part that is used must hold a sample."""
    for part, weight in zip(parts, weights, strict=True):
        if weight > 0 and part.num_tokens <= data.seq_length:
            remedy = "use more text or a smaller data.seq_length"
            if data.split is not None:
                remedy += f", or change data.split ({data.split[0]:g} {data.split[1]:g}), which cuts between documents"
            field = "split" if data.split is not None else name
            raise DataError(
                f"data.{field}: the split '{name}' has {part.num_tokens} tokens of "
                f"{part.dataset.prefix} ({part.dataset.num_tokens} in all); a sample takes data.seq_length + 1 = "
                f"{data.seq_length + 1}; {remedy}"
            )
