"""Pieces of a layer that are one pass over memory on a GPU, for compiled layers alone.

Torch's compiler sums gradients over the tokens (those of biases and of a norm's weights) in passes of their own, or
joins them to passes that then read what another has read already. Here such a sum leaves with the gradient it is of,
and a norm reads its rows once.
"""

from megazero.models.fused.gelu import bias_gelu
from megazero.models.fused.joining import join
from megazero.models.fused.norm import MOST_FEATURES, add_norm

__all__ = ["MOST_FEATURES", "add_norm", "bias_gelu", "join"]
