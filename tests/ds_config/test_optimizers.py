"""Which optimizer a name means, judged by what it computes."""

from __future__ import annotations

import pytest
import torch

from megazero.ds_config import is_elementwise, make_optimizer
from megazero.ds_config.optimizers import choose


def made(name: str, params: dict, parameters):
    choice, found = choose(name, params)
    assert not found, found
    return make_optimizer(choice, parameters)


def trained(optimizer_of, steps: int = 3, pieces: int = 1) -> torch.Tensor:
    """A vector after some steps, whole or as ``pieces`` that the optimizer sees apart."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(12, dtype=torch.float64, generator=generator)
    parts = [torch.nn.Parameter(part.clone()) for part in start.chunk(pieces)]
    optimizer = optimizer_of(parts)
    for _ in range(steps):
        gradient = torch.randn(12, dtype=torch.float64, generator=generator)
        for part, slice_ in zip(parts, gradient.chunk(pieces)):
            part.grad = slice_.clone()
        optimizer.step()
    return torch.cat([part.detach() for part in parts])


@pytest.mark.parametrize(
    ("name", "params", "reference"),
    [
        # DeepSpeed's Adam decouples its decay unless told, and has none unless given.
        ("Adam", dict(lr=0.1, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1)),
        ("adam", dict(lr="0.1"), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0)),
        (
            "Adam",
            dict(lr=0.1, weight_decay=0.1, adam_w_mode=False),
            lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
        ),
        ("AdamW", dict(lr=0.1, adam_w_mode=False), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0)),
        ("AdamW", dict(lr=0.1, torch_adam=True), lambda p: torch.optim.AdamW(p, lr=0.1)),
        ("AdamW", dict(betas=[0.8, 0.9], bias_correction=True), lambda p: torch.optim.AdamW(
            p, lr=1e-3, betas=(0.8, 0.9), weight_decay=0.0)),
        ("SGD", dict(lr=0.1, momentum=0.9, nesterov=True), lambda p: torch.optim.SGD(
            p, lr=0.1, momentum=0.9, nesterov=True)),
        ("Adagrad", dict(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
        ("RMSprop", dict(lr=0.1, centered=True), lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True)),
    ],
)  # fmt: skip
def test_it_computes_what_the_class_of_torch_computes(name, params, reference):
    assert torch.equal(trained(lambda p: made(name, params, p)), trained(reference))


def test_lion_is_the_paper_s():
    """Chen et al. 2023, program 1, by hand."""
    lr, beta1, beta2, decay = 0.1, 0.9, 0.97, 0.2
    ours = trained(lambda p: made("Lion", dict(lr=lr, betas=[beta1, beta2], weight_decay=decay), p), steps=5)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(12, dtype=torch.float64, generator=generator)
    momentum = torch.zeros_like(weight)
    for _ in range(5):
        gradient = torch.randn(12, dtype=torch.float64, generator=generator)
        update = torch.sign(beta1 * momentum + (1 - beta1) * gradient)
        weight = weight - lr * (update + decay * weight)
        momentum = beta2 * momentum + (1 - beta2) * gradient
    assert torch.allclose(ours, weight, rtol=1e-14)


ELEMENTWISE = "Adam AdamW Lion SGD Adagrad Adadelta Adamax ASGD NAdam RAdam RMSprop Rprop".split()


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_element_wise_is_what_pieces_show(name):
    choice, _ = choose(name, dict(lr=0.05))
    assert not choice.whole_tensors
    assert torch.equal(
        trained(lambda p: make_optimizer(choice, p), steps=4),
        trained(lambda p: make_optimizer(choice, p), steps=4, pieces=3),
    )
    assert is_elementwise(make_optimizer(choice, [torch.nn.Parameter(torch.zeros(2))]))


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_others_need_whole_tensors(name):
    choice, found = choose(name, dict(lr=0.05))
    assert not found and choice.whole_tensors
    assert not is_elementwise(getattr(torch.optim, name))


def test_every_optimizer_of_torch_is_decided():
    """A release that adds one makes this fail, so that somebody looks at it."""
    classes = [
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    ]
    assert sorted({*ELEMENTWISE, "Adafactor", "Muon", "LBFGS", "SparseAdam"} - {"Lion"}) == sorted(classes)


def test_a_class_that_is_not_known_is_not_trusted():
    class Changed(torch.optim.AdamW):
        pass

    class AdamW(torch.optim.AdamW):  # somebody else's
        pass

    assert not is_elementwise(Changed) and not is_elementwise(AdamW) and is_elementwise(torch.optim.AdamW)


@pytest.mark.parametrize(
    ("name", "params", "field", "message"),
    [
        ("AdmaW", {}, "type", "did you mean AdamW"),
        ("Lamb", {}, "type", "megazero does not have it"),
        ("OneBitAdam", {}, "type", "megazero does not have it"),
        ("LBFGS", {}, "type", "calls the model again"),
        ("Optimizer", {}, "type", "neither Lion nor in torch.optim"),
        ("AdamW", dict(weigth_decay=1), "params.weigth_decay", "did you mean weight_decay"),
        ("AdamW", dict(betas=[0.9, 1.5]), "params", "beta"),
        ("AdamW", dict(lr="fast"), "params.lr", "'fast' must be a number"),
        ("SGD", dict(lr=[0.1]), "params.lr", "[0.1] must be a number"),
        ("AdamW", dict(betas=0.9), "params.betas", "0.9 must be 2 numbers"),
        ("AdamW", dict(betas=[0.9, 0.95, 0.99]), "params.betas", "must be 2 numbers"),
        ("Lion", dict(betas=[0.9, "x"]), "params.betas", "'x' must be a number"),
        ("SGD", dict(lr=0.1, momentum=0.9, nesterov="no"), "params.nesterov", "must be true or false"),
        ("AdamW", dict(max_grad_norm=1.0), "params.max_grad_norm", "gradient_clipping"),
        ("AdamW", dict(bias_correction=False), "params.bias_correction", "without bias correction"),
        ("AdamW", dict(adam_w_mode="perhaps"), "params.adam_w_mode", "must be true or false"),
        ("Lion", dict(betas=[0.9, 1.0]), "params", "below 1"),
        ("SGD", dict(lr=0.1, nesterov=True), "params", "Nesterov"),
    ],
)
def test_mistakes(name, params, field, message):
    choice, found = choose(name, params)
    assert choice is None and [path for path, _ in found] == [f"optimizer.{field}"]
    assert message in found[0][1]


def test_values_that_are_strings():
    choice, found = choose("SGD", dict(lr="1e-1", momentum="0.9", nesterov="false", weight_decay=0))
    assert not found and choice.params == dict(lr=0.1, momentum=0.9, nesterov=False, weight_decay=0)
    choice, found = choose("Adafactor", dict(eps=[None, "1e-3"]))
    assert not found and choice.params == dict(eps=(None, 1e-3))
    choice, found = choose("Muon", dict(adjust_lr_fn="original", ns_steps="4"))
    assert not found and choice.params == dict(adjust_lr_fn="original", ns_steps=4)
