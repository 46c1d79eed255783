"""Generation from a decoder on any layout: cached keys and values, sampling, text as it comes.

generator = build_generator(weights, inference_config(weights.config, tp, pp, environment.world_size), environment)
generator = Generator(engine.stage.model, engine.topology, engine.stage.sharded)    # or with a training engine's model
generator.generate(prompts, 64, Sampling(temperature=0.8, top_p=0.9))               # on every rank
"""

from __future__ import annotations

from megazero.generation.build import build_generator, inference_config
from megazero.generation.generator import Generator
from megazero.generation.limits import check_prompts, longest
from megazero.generation.sampling import Sampling
from megazero.generation.text import TextStream

__all__ = [
    "Generator",
    "Sampling",
    "TextStream",
    "build_generator",
    "check_prompts",
    "inference_config",
    "longest",
]
