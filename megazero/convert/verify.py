"""Whether both sides of a conversion compute the same: logits of megazero's own model and of transformers'."""

from __future__ import annotations

import gc
import importlib
import os
from typing import Any

import torch

from megazero.convert.weights import Weights
from megazero.errors import ConvertError
from megazero.models.context import build_context
from megazero.models.gpt import GPT

TOLERANCE = 1e-5
"""Of the largest logit, in float32."""

_SEQUENCES, _LENGTH = 2, 48


def need_transformers() -> Any:
    """The module; ConvertError where it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConvertError(f"to verify needs transformers ({error}): pip install transformers") from None


def largest_difference(
    weights: Weights, hf_directory: str | os.PathLike[str], dtype: torch.dtype = torch.float32
) -> float:
    """The largest difference of two logits, over the largest logit, for random tokens; in float32, on the CPU.

    ``dtype``: what the directory's tensors were rounded to, so that ours are rounded alike. The two models are in
    memory one after the other, each whole. inf where a logit is not finite on one side. Raises ConvertError.
    """
    config = weights.config
    length = min(_LENGTH, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(config.vocab_size, (_SEQUENCES, length), generator=generator)
    theirs = _their_logits(hf_directory, tokens_BS)
    gc.collect()
    ours = _our_logits(weights, tokens_BS, dtype)
    if torch.equal(ours, theirs):  # all zero, it may be
        return 0.0
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    return difference if difference == difference else float("inf")


@torch.no_grad()
def _their_logits(directory: str | os.PathLike[str], tokens_BS: torch.Tensor) -> torch.Tensor:
    transformers = need_transformers()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            os.fspath(directory), dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        return model.eval()(tokens_BS).logits
    except Exception as error:  # whatever it makes of a directory that somebody else wrote
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConvertError(f"{directory}: cannot be verified, since transformers cannot run it: {reason}") from error


@torch.no_grad()
def _our_logits(weights: Weights, tokens_BS: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    config = weights.config
    model = GPT(config).eval()
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        stem = module.rpartition(".")[0]
        parts = getattr(model.get_submodule(module), "parts", None)
        row = 0
        for global_name in [name] if parts is None else [f"{stem}.{part.name}.{kind}" for part in parts]:
            value = weights.read(global_name).to(dtype)
            parameter[row : row + len(value)].copy_(value)
            row += len(value)
    count, length = tokens_BS.shape
    return model.head(model(tokens_BS.flatten(), build_context(config, length, count))).view(count, length, -1)
