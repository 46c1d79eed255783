"""How a training program does what every program must: what its speed depends on besides model, layout and chip.

megazero's is what plans are made with. The others are there to hold the model of time against what others publish.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Practice:
    """The defaults are megazero's.

    ``partial_sum_bytes``: of an element that tensor parallelism adds up over ranks; ``hides_tensor_parallel``: share
    of its collectives that run beside products; ``attention``: speed against the chip's best kernel;
    ``repeated_products``: share of the matrix products that selective recompute does again; ``passes``: over memory
    per pass of a fused kernel; ``logit_bytes``: that cross memory per logit, from product to product;
    ``loss_has_backward``: the gradients of the output projection are made in backward; ``fuses_gradient``: when a
    weight's product adds to its gradient in the same pass; ``stores_scores``: attention is matrix products with the
    scores in memory, which is what selective recompute does again; ``recomputes_all``: full recompute makes a layer's
    last product again, although backward has no use for it.

    What the host takes to issue a layer's forward and backward is Efficiency.issue times ``issued_layer``, and by these
    parts of it more: ``issued_collective`` for each along tp, ``issued_gathers`` at stage 3, ``issued_again`` for full
    recompute.
    """

    partial_sum_bytes: int = 4
    hides_tensor_parallel: float = 0.0
    attention: float = 1.0
    repeated_products: float = 0.0
    passes: float = 1.0
    logit_bytes: float = 8.0
    loss_has_backward: bool = False
    fuses_gradient: Literal["always", "without recompute", "never"] = "without recompute"
    stores_scores: bool = False
    recomputes_all: bool = False
    issued_layer: float = 1.0
    issued_collective: float = 0.15
    issued_gathers: float = 0.6
    issued_again: float = 0.65


MEGAZERO = Practice()

# Megatron-LM of 2024 with Transformer Engine, --overlap-grad-reduce, --overlap-param-gather and --tp-comm-overlap:
# collectives of tensor parallelism in 16 bits, most of them under the products; float32 logits in unfused kernels.
# ``passes`` is fitted on one published row (tests/planner/test_published_runs.py).
MEGATRON_2024 = Practice(
    partial_sum_bytes=2,
    hides_tensor_parallel=0.7,
    passes=3.5,
    logit_bytes=52.0,
    loss_has_backward=True,
    fuses_gradient="always",
    recomputes_all=True,
    issued_layer=0.0,
)
# Megatron-LM of 2021 and 2022 (arXiv 2104.04473, 2205.05198): no fused attention, nothing hidden.
MEGATRON_2021 = Practice(
    partial_sum_bytes=2,
    logit_bytes=52.0,
    loss_has_backward=True,
    fuses_gradient="always",
    stores_scores=True,
    recomputes_all=True,
    issued_layer=0.0,
)
# A model of transformers under its Trainer, without torch.compile. No run stands behind it: it is Megatron-LM's unfused
# kernels and logits, and a host that issues an eager layer as megazero's issues its own.
TRANSFORMERS = Practice(
    passes=3.5, logit_bytes=52.0, loss_has_backward=True, fuses_gradient="never", recomputes_all=True
)
# torchtitan with torch.compile: torch's flash attention (262 TFLOP/s where cuDNN's has 459), every other product of a
# layer done again under selective recompute, logits in float32.
TORCHTITAN = Practice(
    partial_sum_bytes=2,
    attention=0.57,
    repeated_products=0.5,
    fuses_gradient="never",
    passes=1.3,
    logit_bytes=16.0,
    loss_has_backward=True,
    recomputes_all=True,
    issued_layer=0.0,
)
