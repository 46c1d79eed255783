"""What a parameter is while its values are not there: its shape can be asked for, its values can not.

[Note: class of a parameter] A parameter stays one object, in the user's lists and optimizers. It is a plain
torch.nn.Parameter while it is whole, so that operations on it cost nothing more, and of a class here while it is not.
Parameters of a class of their own are left as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from megazero.errors import MegazeroError
from megazero.zero.homes import InEngine, home_of

_Tensor = torch.Tensor
_shapes = WeakIdKeyDictionary()
"""What `_shape_only` made → a weak reference to the parameter. Not an attribute, which would travel into pickles."""

# What may be asked of a parameter that is not there: nothing of this reads its values.
_ALLOWED = (
    {
        getattr(_Tensor, name).__get__
        for name in (
            "shape dtype device requires_grad grad is_leaf grad_fn ndim names layout is_cuda is_cpu is_meta itemsize "
            "nbytes is_sparse is_quantized is_mkldnn is_nested output_nr retains_grad volatile _backward_hooks _version"
        ).split()
        if hasattr(getattr(_Tensor, name, None), "__get__")
    }
    | {
        getattr(_Tensor, name)
        for name in (
            "size dim numel nelement element_size stride storage_offset is_floating_point is_complex is_contiguous "
            "is_signed ndimension get_device register_hook register_post_accumulate_grad_hook __len__ __hash__ "
            "is_inference"
        ).split()
    }
    | {
        _Tensor.grad.__set__,
        _Tensor.grad.__delete__,
        _Tensor.requires_grad.__set__,
        _Tensor.requires_grad_,
        torch.numel,
        torch.is_floating_point,
        torch.is_complex,
        torch._has_compatible_shallow_copy_type,
    }
)


def placeholder(like: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A tensor of one element's memory, in the shape and dtype of another, and on its device unless one is given."""
    value = float("nan") if like.is_floating_point() or like.is_complex() else 0
    return torch.full((), value, dtype=like.dtype, device=device or like.device).expand(like.shape)


def set_class(parameters: Sequence[nn.Parameter], before: type | None, after: type | None) -> None:
    """Change the class of those that are of ``before``."""
    if before is None or after is None:
        return
    for parameter in parameters:
        if type(parameter) is before:
            parameter.__class__ = after


class ShardedParameter(nn.Parameter):
    """A parameter whose values are cut over ranks."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _ALLOWED:
            return _without_guard(func, args, kwargs)
        absent = _guarded(args, kwargs, ShardedParameter)
        if absent and all(getattr(home_of(p), "is_being_built", False) for p in absent):
            home_of(absent[0]).builder.make_whole(absent)
            return func(*args, **kwargs)
        if absent and _only_reads(func, args, kwargs) and all(_lent(parameter) for parameter in absent):
            return func(*args, **kwargs)
        # Where weights are tied, before there is an engine, libraries read .data for its size alone.
        if func is _Tensor.detach or func == _Tensor.data.__get__ and hasattr(home_of(absent[0]), "duplicate"):
            return _shape_only(absent[0])
        if _changes_nothing(func, args, kwargs):
            return args[0] if func != _Tensor.data.__set__ else None
        raise MegazeroError(_refusal(_name(func), absent[0]))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        home = home_of(self)
        if not hasattr(home, "duplicate"):
            raise MegazeroError(_refusal("deepcopy", self))
        if id(self) not in memo:
            memo[id(self)] = home.duplicate(self)
        return memo[id(self)]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return f"Parameter cut over ranks, shape {tuple(self.shape)}, {self.dtype}"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


class LateParameter(nn.Parameter):
    """A whole parameter whose update is on its way from other ranks: whoever reads it waits for that."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in _ALLOWED:
            for parameter in _guarded(args, kwargs, LateParameter):
                home = home_of(parameter)
                if isinstance(home, InEngine):
                    home.block.use()
        return _without_guard(func, args, kwargs)


@dataclass(frozen=True)
class Guard:
    """``cut``: the class of parameters whose values are on other ranks; ``late``: of those still on their way."""

    cut: type[nn.Parameter] = ShardedParameter
    late: type[nn.Parameter] = LateParameter


def _without_guard(func: Any, args: tuple, kwargs: dict) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _shape_only(parameter: nn.Parameter) -> torch.Tensor:
    """What a state_dict holds of it, where libraries look up names and shapes: it has no values either."""
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.Tensor._make_subclass(ShardedParameter, parameter.detach(), False)
    _shapes[made] = weakref.ref(_parameter_of(parameter))
    return made


def _parameter_of(values: Any) -> Any:
    """The parameter whose shape that is; of anything else, itself."""
    reference = _shapes.get(values) if isinstance(values, ShardedParameter) else None
    parameter = None if reference is None else reference()
    return values if parameter is None else parameter


def _guarded(args: tuple, kwargs: dict, kind: type) -> list[nn.Parameter]:
    return [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, kind)]


def _only_reads(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether it leaves cut parameters as they are: a change would be lost when they are let go."""
    name = _name(func)
    in_place = name == "data" or name.startswith(("__i", "__set")) or (name[-1] == "_" and not name.startswith("__"))
    changed = (args[:1] if in_place else (), kwargs.get("out"))
    return not _guarded(changed, {}, ShardedParameter)


def _lent(parameter: nn.Parameter) -> bool:
    """Whether a running forward or backward may have it, and then it is there."""
    home = home_of(parameter)
    return isinstance(home, InEngine) and home.sharded.lend(home.sharded.unit_of(home.index))


def _changes_nothing(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether it is a move, as ``model.to(device)`` makes, to where the parameter is, or can be without its values; or
    a padding to the size that it has, as libraries make where weights are tied."""
    if func == _Tensor.data.__set__:  # a new object each time
        return args[0] is args[1] or _parameter_of(args[1]) is args[0]
    if func is torch.nn.functional.pad:
        return not any(args[1])
    if func not in (_Tensor.to, _Tensor.cuda) or isinstance(next(iter(args[1:]), None), _Tensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        own = args[0].device
        if func is _Tensor.cuda:
            wanted = kwargs.get("device", args[1] if len(args) > 1 else None)
            device = torch.device("cuda", wanted) if isinstance(wanted, int) else torch.device(wanted or "cuda")
        else:
            device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **kwargs)
            if dtype not in (None, args[0].dtype) or kwargs.get("copy", False):
                return False
            device = device or own
    if device.type == own.type and device.index in (None, own.index):
        return True
    home = home_of(args[0])
    return hasattr(home, "move") and home.move(args[0], device)


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return getattr(getattr(func, "__self__", None), "__name__", name) if name in ("__get__", "__set__") else name


def _refusal(what: str, parameter: nn.Parameter) -> str:
    home = home_of(parameter)
    name = f"{home.name_of(parameter)}, " if isinstance(home, InEngine) else ""
    return (
        f"{what}: the values of this parameter ({name}shape {tuple(parameter.shape)}) are cut over the ranks (stage 3)."
        " Use it inside `with megazero.zero.GatheredParameters(parameter):` on every rank; to use it in a module other "
        "than its own, call megazero.zero.register_external_parameter(module, parameter); to save weights, call "
        "engine.save_16bit_model, or pass engine.module_state_dict() as state_dict to save_pretrained"
    )
