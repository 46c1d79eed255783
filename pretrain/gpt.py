"""Pretrains a GPT: parse, build, train.

    megazero launch --nproc 4 pretrain/gpt.py --config FILE.yaml --section.field VALUE …

``--help`` prints every setting.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
sys.path[0] = ROOT  # the rooms beside this one, and no file of this room by its bare name

from data.sources import build_sources  # noqa: E402
from megazero.config import load_config  # noqa: E402
from megazero.engine import Engine, resolve_model  # noqa: E402
from megazero.launch.environment import process_environment  # noqa: E402
from megazero.launch.errors import report_errors  # noqa: E402


def main() -> None:
    environment = process_environment()
    config = load_config(sys.argv[1:], world_size=environment.world_size)
    config = resolve_model(config, environment.world_size)
    train, valid = build_sources(config.data, vocab_size=config.model.vocab_size)
    with Engine(config, environment) as engine:
        while engine.running():
            engine.train_batch(train)
            if valid is not None and engine.due(config.train.eval_interval):
                engine.evaluate(valid)
            if engine.due(config.checkpoint.save_interval):
                engine.save(train)
        engine.save(train)


if __name__ == "__main__":
    with report_errors():
        main()
