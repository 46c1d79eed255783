"""What a model can be asked to generate, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.errors import ConfigError
from megazero.models.config import ModelConfig


def longest(model: ModelConfig) -> int | None:
    """Tokens of prompt and continuation together at most; None where positions have no end (rotary)."""
    return model.max_position_embeddings if model.position == "learned" else None


def check_prompts(model: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raises ConfigError with every prompt, counted from 1, that this model cannot continue by that many tokens."""
    problems: list[tuple[str, str]] = []
    if max_new_tokens < 1:
        problems.append(("max_new_tokens", f"{max_new_tokens} must be at least 1"))
    if not prompts:
        problems.append(("prompt", "there is none"))
    limit = longest(model)
    for number, prompt in enumerate(prompts, start=1):
        field = f"prompt {number}"
        strange = [token for token in prompt if not 0 <= token < model.vocab_size]
        if not prompt:
            problems.append((field, "has no tokens; give at least one to continue from"))
        elif strange:
            problems.append((field, f"token {strange[0]} is outside the vocabulary of {model.vocab_size}"))
        elif limit is not None and len(prompt) >= limit:
            problems.append((field, f"its {len(prompt)} tokens fill the model's {limit} positions; shorten it"))
        elif limit is not None and len(prompt) + max_new_tokens > limit:
            problems.append(
                (
                    field,
                    f"its {len(prompt)} tokens and {max_new_tokens} new ones are more than the model's {limit} "
                    f"positions; ask for at most {limit - len(prompt)}",
                )
            )
    if problems:
        raise ConfigError(problems)
