"""What a parameter is while its values are on other ranks: its shape can be asked for, its values can not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megazero.errors import MegazeroError

_Tensor = torch.Tensor

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
            "is_set_to is_shared is_inference type"
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
    }
)


class ShardedParameter(nn.Parameter):
    """A parameter whose values are cut over ranks. Its class is this one only while they are.

    [Note: class of a parameter] A parameter stays one object, in the user's lists and optimizers; while it is gathered
    it is a plain torch.nn.Parameter, so that operations on it cost nothing more.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise MegazeroError(
            f"{getattr(func, '__name__', func)}: the values of this parameter of shape {tuple(_shape(args))} are cut "
            "over the ranks (stage 3). Use it inside `with megazero.zero.GatheredParameters(parameter):` on every "
            "rank; to use it in a module other than its own, call megazero.zero.register_external_parameter(module, "
            "parameter); to save weights, call engine.save_16bit_model"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return f"Parameter cut over ranks, shape {tuple(self.shape)}, {self.dtype}"


def _shape(args: Any) -> torch.Size:
    for arg in torch.utils._pytree.tree_leaves(args):
        if isinstance(arg, ShardedParameter):
            with torch._C.DisableTorchFunctionSubclass():
                return arg.shape
    return torch.Size()
