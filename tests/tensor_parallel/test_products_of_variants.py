"""Gradients made as products beside a layer are those of autograd, whatever a variant does with its projections."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from megazero.models import registry
from megazero.models.attention import Attention
from megazero.models.config import ModelConfig
from megazero.models.context import Context, build_context
from megazero.models.gpt import Layer
from megazero.tensor_parallel.mappings import TensorParallel
from megazero.tensor_parallel.parallelize import parallelize
from megazero.tensor_parallel.weight_products import Product, catch_products, probed_linears

TOKENS = 12
MATRICES = ["attention.qkv", "attention.out", "mlp.inner", "mlp.down"]


class Variant(Attention):
    """``use``: what it does in place of attention."""

    use: Callable[[Variant, torch.Tensor, Context], torch.Tensor] = Attention.forward

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return type(self).use(self, x, context)


def twice(self: Variant, x: torch.Tensor, context: Context) -> torch.Tensor:
    return Attention.forward(self, Attention.forward(self, x, context), context)


def not_at_all(self: Variant, x: torch.Tensor, context: Context) -> torch.Tensor:
    return 0.5 * x


def one_part(self: Variant, x: torch.Tensor, context: Context) -> torch.Tensor:
    return self.out(self.qkv(x)[1])


def some_tokens(self: Variant, x: torch.Tensor, context: Context) -> torch.Tensor:
    few = self.out(self.qkv(x[:5])[0])
    return Attention.forward(self, x, context) + few.mean(0)


def more_tokens(self: Variant, x: torch.Tensor, context: Context) -> torch.Tensor:
    return self.out(self.qkv(torch.cat((x, x.sin())))[2]).unflatten(0, (2, -1)).sum(0)


def another_shape(self: Variant, x: torch.Tensor, context: Context) -> torch.Tensor:
    return self.out(self.qkv(x[:, None])[0])[:, 0]


def first_without_gradients(self: Variant, x: torch.Tensor, context: Context) -> torch.Tensor:
    with torch.no_grad():
        y = Attention.forward(self, x, context)
    return y * Attention.forward(self, x, context)


def as_a_matrix(self: Variant, x: torch.Tensor, context: Context) -> torch.Tensor:
    return Attention.forward(self, x, context) + x @ self.out.weight


def in_few_bits(self: Variant, x: torch.Tensor, context: Context) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return Attention.forward(self, x, context).float()


def changing_what_it_got(self: Variant, x: torch.Tensor, context: Context) -> torch.Tensor:
    y = self.out(self.qkv(x)[0])
    y *= 2.0
    y += x
    return y


def changing_what_it_gave(self: Variant, x: torch.Tensor, context: Context) -> torch.Tensor:
    given = 1.5 * x
    q, _, _ = self.qkv(given)
    return self.out(q) + given.mul_(2.0)


@pytest.fixture(autouse=True)
def _variant(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    registry.register_attention("variant", Variant)
    yield
    registry._attentions.clear()


def config_of(attention: str) -> ModelConfig:
    return ModelConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=8, position="rotary", attention=attention
    )


def layer_of(attention: str = "softmax") -> Layer:
    """The one rank's layer, its values always the same."""
    with torch.device("meta"):
        holder = nn.ModuleDict({"layer": Layer(config_of(attention))})
    parallelize(holder, TensorParallel(), 1, tied=False)
    generator = torch.Generator().manual_seed(0)
    for parameter in holder.to_empty(device="cpu").parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return holder["layer"]


def run(layer: Layer, attention: str = "softmax") -> dict[str, torch.Tensor]:
    """One forward and backward: the output and the gradients that are on the parameters."""
    x = torch.randn(TOKENS, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = layer(x, build_context(config_of(attention), TOKENS // 2, 2))
    (y + y.square()).sum().backward()
    found = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **found}


def add(products: list[Product]) -> None:
    """As the gradient buffer has it, to what autograd has left on the parameters."""
    for product in products:
        if product.grad is not None and product.inside is not None:
            weight, grad = product.linear.weight, product.grad.t() @ product.inside
            weight.grad = grad if weight.grad is None else weight.grad + grad


@pytest.mark.parametrize(
    "use",
    [
        Attention.forward,
        twice,
        not_at_all,
        one_part,
        some_tokens,
        more_tokens,
        another_shape,
        first_without_gradients,
        as_a_matrix,
        in_few_bits,
        changing_what_it_got,
    ],
)
def test_a_variant_may_use_its_projections_in_any_way(use: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Variant, "use", use)
    plain, caught = layer_of("variant"), layer_of("variant")
    calls: list[list[Product]] = []
    catch_products(caught, lambda products: calls.append(list(products)) or add(products))
    wanted, found = run(plain, "variant"), run(caught, "variant")
    assert len(calls) == 1 and all(linear.probe is linear.inside is None for linear in probed_linears(caught))
    made = {product.linear for product in calls[0] if product.grad is not None}
    assert {caught.mlp.inner, caught.mlp.down} <= made
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)


def test_what_is_multiplied_may_not_change_before_the_product_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Variant, "use", changing_what_it_gave)
    caught = layer_of("variant")
    catch_products(caught, add)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(caught, "variant")


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 0.5 * weight


def parametrized(linear: nn.Module) -> None:
    parametrize.register_parametrization(linear, "weight", Halved())


def hooked(linear: nn.Module) -> None:
    linear.weight.register_hook(lambda grad: 3 * grad)


def hooked_behind(linear: nn.Module) -> None:
    def triple(weight: torch.Tensor) -> None:
        weight.grad.mul_(3)

    linear.weight.register_post_accumulate_grad_hook(triple)


def frozen(linear: nn.Module) -> None:
    linear.weight.requires_grad_(False)


@pytest.mark.parametrize("change", [parametrized, hooked, hooked_behind, frozen])
@pytest.mark.parametrize("which", [["mlp.down"], MATRICES])
def test_a_gradient_that_somebody_is_to_see_is_autograds(change: Callable, which: list[str]) -> None:
    plain, caught = layer_of(), layer_of()
    seen: list[nn.Module] = []
    catch_products(caught, lambda products: seen.extend(p.linear for p in products) or add(products))
    for layer in (plain, caught):
        for name in which:
            change(layer.get_submodule(name))
    wanted, found = run(plain), run(caught)
    assert [linear for linear in probed_linears(caught) if linear not in seen] == [
        caught.get_submodule(name) for name in which
    ]
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_is_a_layer_of_its_own(copied: Callable[[Layer], Layer]) -> None:
    caught = layer_of()
    catch_products(caught, lambda products: pytest.fail("a copy is in no engine"))
    twin = copied(caught)
    wanted, found = run(layer_of()), run(twin)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not torch.equal(run(twin)["y"], wanted["y"])
    assert all(parameter.grad is None and parameter.any() for parameter in caught.parameters())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_plain_use_of_every_layout_is_left_to_others(sequence_parallel: bool) -> None:
    """Else autograd would make the gradient, and nothing would show it but the time that it takes."""
    with torch.device("meta"):
        holder = nn.ModuleDict({"layer": Layer(config_of("softmax"))})
    parallelize(holder, TensorParallel(2, 1, sequence_parallel), 1, tied=False)
    outside = TOKENS // 2 if sequence_parallel else TOKENS
    for name in MATRICES:
        linear = holder["layer"].get_submodule(name)
        column = name in ("attention.qkv", "mlp.inner")
        tokens, features = outside if column else TOKENS, linear.weight.shape[1]
        assert not linear.is_probed(torch.empty(tokens, features), column)
        linear.probe = torch.empty(()).expand(TOKENS, linear.weight.shape[0])
        assert linear.is_probed(torch.empty(tokens, features), column), name
        assert not linear.is_probed(torch.empty(tokens + 1, features), column), name
        assert not linear.is_probed(torch.empty(tokens, 1, features), column), name
