"""transformers' Trainer on megazero by an explicit import, for scripts that say so rather than their launch command:

from megazero.integrations.transformers import Trainer, TrainingArguments

before transformers' own, peft's or trl's. Trainer and TrainingArguments are transformers' with a setting ``zero``: a
ds_config, as a mapping or a JSON file's path. Any launcher that sets RANK and the like will do, or none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megazero.integrations import hook

hook.install()

import transformers  # noqa: E402  (it asks at once whether DeepSpeed is there)

from megazero.foreign.engine import ZeroEngine  # noqa: E402

__all__ = ["Trainer", "TrainingArguments"]


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """``zero``: what transformers calls ``deepspeed``."""

    zero: dict | str | None = field(default=None, metadata={"help": "a ds_config.json: the ZeRO stage and the like"})

    def __post_init__(self) -> None:
        if self.zero is not None:
            self.deepspeed = self.zero
        super().__post_init__()


class Trainer(transformers.Trainer):
    """``engine``: what trains the model, once training or evaluation has begun; else None."""

    @property
    def engine(self) -> ZeroEngine | None:
        return self.deepspeed
