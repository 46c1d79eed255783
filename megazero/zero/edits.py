"""What the user does to whole parameters between steps: changes in place become the model's, new tensors are errors."""

from __future__ import annotations

from megazero.errors import MegazeroError
from megazero.zero.block import Block
from megazero.zero.sharded import ShardedModel


class EditWatch:
    """Looks at the parameters that are whole between uses: at stages 0 to 2 all of them.

    A change in place shows in autograd's version of the tensor. Without a look at it, the float32 masters of 16-bit
    parameters would undo it at the next update.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self._blocks = [block for block in sharded.blocks if not block.sharding.parameters]
        self.note()

    def note(self) -> None:
        """The parameters are what they should be."""
        self._versions = [_versions(block) for block in self._blocks]

    def take(self) -> None:
        """Adopt what was changed since the last note. Raises MegazeroError where a parameter is another tensor now."""
        for block, versions in zip(self._blocks, self._versions, strict=True):
            for entry, parameter, view in zip(block.layout.entries, block.parameters, block.views, strict=True):
                if parameter.data_ptr() != view.data_ptr() or parameter.dtype != view.dtype:
                    raise MegazeroError(
                        f"{entry.name} was given other data, of {parameter.dtype} on {parameter.device}, by "
                        "`parameter.data = ...`, module.half(), .to() or the like: the engine trains the tensor it had."
                        " Change values in place, under torch.no_grad(); set the dtype in the config"
                    )
            if block.master is not block.values and versions != _versions(block):
                block.adopt()


def _versions(block: Block) -> list[int]:
    return [parameter._version for parameter in block.parameters]
