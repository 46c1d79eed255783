"""What one micro-batch tells every layer besides the activations."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from megazero.models import rotary
from megazero.models.config import ModelConfig
from megazero.models.dropout import token_keys


class Cache(Protocol):
    """Where attention leaves keys and values for the tokens to come, in generation."""

    def of_layer(self, index: int) -> Cache:
        """The part that belongs to the layer of that global index."""
        ...

    def extend(self, k_BSgD: torch.Tensor, v_BSgD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep a layer's keys and values; returns those of all L tokens so far, these included, (B, L, g, D)."""
        ...


class Context(NamedTuple):
    """The same for all layers of one micro-batch of B sequences of S tokens; T = B·S.

    seq_length: S.
    cos, sin: rotary tables, (S, D) or, with per-document positions, (T, D), float32; None with learned positions.
    positions: (S,) int64, the same in every sequence, or, per document, (T,); read by learned position embeddings.
    mask: None for plain causal attention, else (B or 1, 1, S, keys) bool, True where a query sees a key.
    dropout_key: (T,) int64, a number unique to each token of the run, or None without dropout; within a layer (2, T),
        derived from it. Where activations are a slice of the T tokens this is the same slice.
    cache: None where the S tokens are all there is to see; else what came before them is in it.
    """

    seq_length: int
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    positions: torch.Tensor
    mask: torch.Tensor | None
    dropout_key: torch.Tensor | None
    cache: Cache | None = None


class ContextBuilder:
    """Makes the contexts of sequences of one length on one device; what all have in common is made once.

    ``seq_length``: S, in tokens. ``seed``: of the dropout masks. A call neither waits for the device nor, without
    per-document positions, does work that grows with S² or the head size.
    """

    def __init__(self, config: ModelConfig, seq_length: int, device: torch.device | str, seed: int = 0) -> None:
        self._seq_length, self._device, self._seed = seq_length, device, seed
        self._has_dropout = config.dropout > 0
        self._order = torch.arange(seq_length, device=device)
        self._inv_freq = self._tables = None
        if config.position == "rotary":
            self._inv_freq, self._amplitude = rotary.inverse_frequencies(config).to(device), rotary.amplitude(config)
            self._tables = rotary.tables(self._inv_freq, self._amplitude, self._order)
        window = config.sliding_window
        self._window = window if window is not None and window < seq_length else None

    @cached_property
    def _visible(self) -> torch.Tensor:
        """(S, S) bool, True where the query (row) sees the key (column) in one document."""
        query, key = self._order[:, None], self._order[None, :]
        visible = query >= key
        return visible if self._window is None else visible & (query - self._window < key)

    def __call__(
        self,
        batch_size: int,
        positions: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
        samples: torch.Tensor | None = None,
    ) -> Context:
        """The context of ``batch_size`` sequences.

        ``positions`` (B, S) int64: where tokens stand in their documents; None is 0, 1, … S − 1.
        ``documents`` (B, S) int64: tokens see only those of the same number; None is no such bound.
        ``samples`` (B,) int64: numbers of the sequences, each used once in a run; needed to train with dropout.
        """
        cos, sin = (None, None) if self._tables is None else self._tables
        if positions is not None and self._inv_freq is not None:
            cos, sin = rotary.tables(self._inv_freq, self._amplitude, positions.flatten())
        mask = None if self._window is None else self._visible[None, None]
        if documents is not None:
            mask = (self._visible & (documents[:, :, None] == documents[:, None, :]))[:, None]
        key = None
        if samples is not None and self._has_dropout:
            key = token_keys((samples[:, None] * self._seq_length + self._order).flatten(), self._seed)
        positions = self._order if positions is None else positions.flatten()
        return Context(self._seq_length, cos, sin, positions, mask, key)


def build_context(
    config: ModelConfig,
    seq_length: int,
    batch_size: int,
    positions: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
    samples: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Context:
    """One context; a loop should keep a ContextBuilder. Arguments are those of ContextBuilder and of its call."""
    return ContextBuilder(config, seq_length, device, seed)(batch_size, positions, documents, samples)
