"""Gradients of matrices that are caught as products: the same numbers as autograd's, and autograd's where it must."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megazero.models.config import ModelConfig
from megazero.models.context import build_context
from megazero.models.gpt import GPT
from megazero.tensor_parallel.mappings import TensorParallel
from megazero.tensor_parallel.parallelize import parallelize
from megazero.tensor_parallel.weight_products import Product, catch_products, join, probed_linears

CONFIG = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, vocab_size=32)
TOKENS = 2 * 6


def decoder(config: ModelConfig = CONFIG) -> GPT:
    """Layers alone, as a rank has them, with values."""
    with torch.device("meta"):
        model = GPT(config, first=False, last=False)
    parallelize(model, TensorParallel(), 1, tied=True)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def run(model: GPT, times: int = 1) -> torch.Tensor:
    """Backward through it; the gradient of its input."""
    x = torch.randn(TOKENS, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for _ in range(times):
        y = model(x, build_context(model.config, 6, 2))
        y.square().sum().backward()
    assert x.grad is not None
    return x.grad


def catching(model: GPT) -> list[Product]:
    """From here on its layers' products; the list grows."""
    products: list[Product] = []
    for layer in model.layers.values():
        catch_products(layer, products.extend)
    return products


def made(product: Product) -> torch.Tensor:
    assert product.grad is not None and product.inside is not None
    return product.grad.t() @ product.inside


def test_products_are_the_gradients() -> None:
    plain, model = decoder(), decoder()
    wanted, products = run(plain), catching(model)
    assert torch.equal(run(model), wanted)
    linears = probed_linears(model)
    assert len(linears) == 8 and {id(p.linear) for p in products} == {id(linear) for linear in linears}
    # The last layer first, as its backward runs first.
    assert [p.linear for p in products[:4]] == probed_linears(model.layers["1"])
    gradients = {p.linear.weight: made(p) for p in products}
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (ours in gradients), name
        assert torch.equal(gradients.get(ours, ours.grad), theirs.grad), name
    assert all(linear.probe is linear.inside is None for linear in linears)


@pytest.mark.parametrize("watch", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_watched_weight_keeps_autograds_gradient(watch: str) -> None:
    """Somebody's hook sees it, and what it makes of it counts."""
    model, seen = decoder(), []
    weight = model.layers["0"].mlp.down.weight
    products = catching(model)
    handle = getattr(weight, watch)(lambda grad: seen.append(grad))
    run(model)
    assert len(seen) == 1 and weight.grad is not None and len(products) == 7
    handle.remove()
    weight.grad = None
    products.clear()
    run(model)
    assert len(seen) == 1 and weight.grad is None and len(products) == 8


def test_without_gradients_nothing_is_caught() -> None:
    model = decoder()
    products = catching(model)
    context, x = build_context(model.config, 6, 2), torch.ones(TOKENS, CONFIG.hidden_size)
    with torch.no_grad():
        without = model(x, context)
    assert torch.equal(model(x, context), without) and not products


def test_an_error_in_a_layer_leaves_nothing() -> None:
    model = decoder()
    products = catching(model)

    def fail(*_: torch.Tensor) -> torch.Tensor:
        raise ValueError("planted")

    activation, model.layers["1"].mlp.activation = model.layers["1"].mlp.activation, fail
    with pytest.raises(ValueError, match="planted"):
        run(model)
    assert all(linear.probe is linear.inside is None for linear in probed_linears(model))
    model.layers["1"].mlp.activation = activation
    assert torch.equal(run(model), run(decoder())) and len(products) == 8


def test_a_linear_that_is_not_used_has_no_product() -> None:
    model = decoder()
    products = catching(model)
    mlp = model.layers["0"].mlp
    mlp.forward = lambda x: x
    run(model)
    unused = [p for p in products if p.linear in (mlp.inner, mlp.down)]
    assert [p.grad for p in unused] == [p.inside for p in unused] == [None, None]


def test_layers_are_compiled_once() -> None:
    """What the first forward leaves on a linear would else be a reason to compile all layers anew in the second."""
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    model = decoder()
    for layer in model.layers.values():
        layer.forward = torch.compile(layer.forward, fullgraph=True, backend=count, dynamic=False)
    products = catching(model)
    for _ in range(2):
        run(model)
    assert len(products) == 16 and all(product.inside is not None for product in products)
    assert len(graphs) == 1


def test_join() -> None:
    parts = [torch.randn(5, n) for n in (3, 1, 4)]
    whole, sums = join(parts)
    assert torch.equal(whole, torch.cat(parts, 1)) and torch.equal(sums, whole.sum(0))
