"""Pipelines of a user's own layers, by DeepSpeed's names; `megazero.initialize` takes a PipelineModule as its model."""

from megazero.foreign.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
