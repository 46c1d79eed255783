"""Weights from and to Hugging Face, and from Megatron-Core and DeepSpeed.

weights = open_weights(path)                        # of any of them, or a megazero checkpoint
weights.config, weights.read(name, box)
import_checkpoint(hf_dir, checkpoint_dir)
export(checkpoint_dir, hf_dir, dtype="bfloat16")
"""

from __future__ import annotations

from megazero.convert.hf_reader import HFWeights
from megazero.convert.hf_writer import export
from megazero.convert.importer import import_checkpoint
from megazero.convert.weights import CheckpointWeights, Weights, model_of, open_weights

__all__ = ["CheckpointWeights", "HFWeights", "Weights", "export", "import_checkpoint", "model_of", "open_weights"]
