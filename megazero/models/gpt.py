"""The decoder: GPT-2, GPT-3, Llama, Qwen or Mistral by its config."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

import torch
from torch import nn

from megazero.models import registry
from megazero.models.attention import Attention
from megazero.models.config import ModelConfig
from megazero.models.context import Context
from megazero.models.dropout import Dropout, Site, derive_key, layer_keys
from megazero.models.layers import Head, PositionEmbedding, WordEmbedding
from megazero.models.mlp import MLP
from megazero.models.norm import AddNorm, add_norm, build_norm


class Embedding(nn.Module):
    """Words, plus learned positions where the config has them, then dropout."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.word = WordEmbedding(config.vocab_size, hidden)
        learned = config.position == "learned"
        self.position = PositionEmbedding(config.max_position_embeddings, hidden) if learned else None
        self.dropout = Dropout(config.dropout)

    def forward(self, tokens_T: torch.Tensor, context: Context) -> torch.Tensor:
        """(T,) int64 → (T, H)."""
        x_TH = self.word(tokens_T)
        if self.position is not None:
            x_TH = x_TH + self.position(context.positions, tokens_T.numel())
        key_T = context.dropout_key
        return self.dropout(x_TH, None if key_T is None else derive_key(key_T, Site.EMBEDDING))


class Layer(nn.Module):
    """Attention and MLP, each on a normalised copy of the residual stream that it adds to ("pre-norm").

    Layers of one model differ in their parameters alone, so one compiled graph serves them all.

    ``add_norm``: a build may put another one in its place.
    """

    add_norm: AddNorm = staticmethod(add_norm)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        softmax = config.attention == registry.BUILTIN_ATTENTION
        build_attention = Attention if softmax else registry.attention_variant(config.attention)
        self.attention_norm = build_norm(config)
        self.attention = build_attention(config)
        self.attention_dropout = Dropout(config.dropout)
        self.mlp_norm = build_norm(config)
        self.mlp = MLP(config)
        self.mlp_dropout = Dropout(config.dropout)

    def forward(self, x_TH: torch.Tensor, context: Context) -> torch.Tensor:
        """(T, H) → (T, H). ``context.dropout_key``: (2, T), the keys of the layer's two sites."""
        attention_key, mlp_key = (None, None) if context.dropout_key is None else context.dropout_key.unbind()
        x_TH, normed = self.add_norm(x_TH, None, self.attention_norm)
        attended = self.attention_dropout(self.attention(normed, context), attention_key)
        x_TH, normed = self.add_norm(x_TH, attended, self.mlp_norm)
        return x_TH + self.mlp_dropout(self.mlp(normed), mlp_key)


class GPT(nn.Module):
    """A decoder-only transformer, or a run of its layers with what stands before and behind them.

    ``layers``: global indices of the layers to have, ascending; None is all. ``first``: has the embedding.
    ``last``: has the final norm and the head. Parameters are left uninitialised: see init.py. A model that is
    both first and last and has a tied head holds one parameter under both names; a last-only one has its own.
    """

    def __init__(
        self, config: ModelConfig, layers: Iterable[int] | None = None, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        indices = range(config.num_layers) if layers is None else layers
        self.config = config
        self.embedding = Embedding(config) if first else None
        self.layers = nn.ModuleDict({str(index): Layer(config) for index in indices})
        self.final_norm = build_norm(config) if last else None
        self.head = Head(config.vocab_size, config.hidden_size) if last else None
        self.tie()

    def tie(self) -> None:
        """Let the head use the embedding's parameter, where the config says so and both are here."""
        if self.config.tie_word_embeddings and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.word.weight

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> GPT:
        # Moving off the meta device makes a new parameter for each name.
        super()._apply(fn, recurse)
        self.tie()
        return self

    def forward(self, x: torch.Tensor, context: Context, layers: Container[int] | None = None) -> torch.Tensor:
        """Tokens (T,) int64 where this has the embedding, else (T, H) → (T, H), final norm applied where it is here.

        ``layers``: global indices of those to run; None is all. What stands before the first layer and behind the last
        one runs with it. The head is left to the caller: ``model.head(x)``.
        """
        layers = range(self.config.num_layers) if layers is None else layers
        keys = None if context.dropout_key is None else layer_keys(context.dropout_key, self.config.num_layers)
        if self.embedding is not None and 0 in layers:
            x = self.embedding(x, context)
        for index, layer in self.layers.items():
            if int(index) in layers:
                x = layer(x, layer_context(context, int(index), keys))
        if self.final_norm is not None and self.config.num_layers - 1 in layers:
            x = self.final_norm(x)
        return x


def layer_context(context: Context, index: int, keys: torch.Tensor | None) -> Context:
    """The context with what is the layer's own, by its global index: its part of the cache and, of dropout's
    ``layer_keys``, its keys.

    Done outside the layer because a number that differs between layers, inside, would compile each anew.
    """
    if context.cache is not None:
        context = context._replace(cache=context.cache.of_layer(index))
    return context if keys is None else context._replace(dropout_key=keys[index])
