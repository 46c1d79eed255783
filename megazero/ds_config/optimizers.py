"""The optimizers that a ds_config names: which class, with which arguments, and whether shards are enough for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from megazero.ds_config.kinds import BOOLEAN, read_argument
from megazero.ds_config.tree import OptimizerChoice
from megazero.errors import near

# Each updates an element from that element's gradient and state alone. The last two are other libraries' Adam.
_ELEMENTWISE = (
    "ASGD Adadelta Adagrad Adam AdamW Adamax Lion NAdam RAdam RMSprop Rprop SGD FusedAdam DeepSpeedCPUAdam"
).split()
_WHOLE_TENSORS = ("Adafactor", "Muon")
# Of torch.optim, but not for an engine: step() would need a closure, or gradients would have to be sparse.
_REFUSED = {"LBFGS": "calls the model again inside its step", "SparseAdam": "takes sparse gradients only"}
_LACKING = ("Lamb", "FusedLamb", "MuAdam", "MuAdamW", "MuSGD", "OneBitAdam", "OneBitLamb", "ZeroOneAdam")

# Arguments that only DeepSpeed's Adam has, and what they are unless given.
_ADAM_FLAGS = {
    "adam_w_mode": True,
    "torch_adam": False,
    "bias_correction": True,
    "fp32_optimizer_states": True,
    "set_grad_none": True,
}


class Lion(torch.optim.Optimizer):
    """Sign of interpolated momentum with decoupled weight decay (Chen et al. 2023, arXiv 2302.06675, program 1)."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas {betas} must be at least 0 and below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                direction = torch.lerp(parameter.grad, state["exp_avg"], beta1).sign_()
                parameter.mul_(1 - lr * group["weight_decay"]).sub_(direction * lr)
                state["exp_avg"].lerp_(parameter.grad, 1 - beta2)
        return loss


def is_elementwise(optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer) -> bool:
    """Whether an optimizer, or a class of them, updates a slice of a tensor by itself as it would in the whole.

    A class that is not known here, a subclass of a known one included, is not trusted.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    return kind.__name__ in _ELEMENTWISE and kind.__module__.split(".")[0] in ("torch", "megazero", "deepspeed", "apex")


def make_optimizer(
    choice: OptimizerChoice, parameters: Iterable[torch.Tensor] | Iterable[dict[str, Any]]
) -> torch.optim.Optimizer:
    """The optimizer chosen, on tensors or on groups of them, which may be flat shards where it is element-wise."""
    return _class(choice.type)(parameters, **choice.params)


def defaults(name: str) -> dict[str, Any]:
    """What each argument of an optimizer is where it is not given; nothing for a name that is not known."""
    exact = {kind.lower(): kind for kind in _known()}.get(name.lower())
    if exact is None:
        return {}
    parameters = list(inspect.signature(_class(exact).__init__).parameters.values())[2:]
    found = {parameter.name: parameter.default for parameter in parameters}
    return found | (_ADAM_FLAGS | {"weight_decay": 0.0} if exact in ("Adam", "AdamW") else {})


def _known() -> tuple[str, ...]:
    return (*_ELEMENTWISE[:-2], *_WHOLE_TENSORS, *_REFUSED)


def choose(name: str, params: Mapping[str, Any]) -> tuple[OptimizerChoice | None, list[tuple[str, str]]]:
    """What a ds_config's optimizer section means, and (field, what is wrong): the choice is None where anything is.

    ``params``: plain values, none of them "auto". An Adam decouples its weight decay unless adam_w_mode is false, and
    has none unless told, as in DeepSpeed.
    """
    known = {kind.lower(): kind for kind in _known()}
    exact = known.get(name.lower())
    if exact is None:
        if name.lower() in [lacking.lower() for lacking in _LACKING]:
            message = f"{name}: megazero does not have it; give an optimizer object to initialize"
        else:
            close = near(name.lower(), list(known), n=1)
            hint = f"did you mean {known[close[0]]}?" if close else f"there are {', '.join(sorted(known.values()))}"
            message = f"{name!r} is neither Lion nor in torch.optim; {hint}"
        return None, [("optimizer.type", message)]
    if exact in _REFUSED:
        return None, [("optimizer.type", f"{exact} {_REFUSED[exact]}, which an engine's step() cannot give")]
    arguments, found = dict(params), []
    if "max_grad_norm" in arguments:
        del arguments["max_grad_norm"]
        found.append(("optimizer.params.max_grad_norm", "no optimizer takes it; set gradient_clipping"))
    if exact in ("Adam", "AdamW"):
        exact = _settle_adam(exact, arguments, found)
    if exact == "Lion":
        arguments.pop("set_grad_none", None)
    allowed = dict(list(inspect.signature(_class(exact).__init__).parameters.items())[2:])
    for argument, value in arguments.items():
        if argument not in allowed:
            close = near(argument, list(allowed), n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(allowed)}"
            found.append((f"optimizer.params.{argument}", f"{exact} has no such argument; {hint}"))
            continue
        try:
            arguments[argument] = read_argument(value, allowed[argument].default)
        except ValueError as error:
            found.append((f"optimizer.params.{argument}", str(error)))
    if not found:
        try:
            _class(exact)([torch.zeros(1, 1, requires_grad=True)], **arguments)
        except Exception as error:  # whatever a class does with what it does not expect
            found.append(("optimizer.params", f"{exact} does not take them: {error}"))
    return (None if found else OptimizerChoice(exact, arguments, exact in _WHOLE_TENSORS)), found


def _settle_adam(name: str, arguments: dict[str, Any], found: list[tuple[str, str]]) -> str:
    """Takes out what only DeepSpeed's Adam has; returns the class of torch.optim that computes the same."""
    flags = {}
    for flag, default in _ADAM_FLAGS.items():
        try:
            flags[flag] = BOOLEAN.read(arguments.pop(flag, default))
        except ValueError as error:
            flags[flag] = default
            found.append((f"optimizer.params.{flag}", str(error)))
    for flag, what in (
        ("bias_correction", "Adam without bias correction"),
        ("fp32_optimizer_states", "16-bit moments"),
    ):
        if not flags[flag]:
            found.append((f"optimizer.params.{flag}", f"false: megazero does not have {what}; leave it out"))
    if not flags["torch_adam"]:
        arguments.setdefault("weight_decay", 0.0)
    return "AdamW" if name == "AdamW" or flags["adam_w_mode"] else "Adam"


def _class(name: str) -> Callable[..., torch.optim.Optimizer]:
    return Lion if name == "Lion" else getattr(torch.optim, name)
