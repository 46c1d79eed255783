"""Weights of a Hugging Face directory, read box by box under our names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint.files import DTYPE_NAMES
from megazero.convert.configs import read_config, read_tokens, shapes_of
from megazero.convert.families import HEAD, Family
from megazero.convert.tensor_files import Stored, open_files, read_json
from megazero.errors import ConvertError
from megazero.models.config import ModelConfig
from megazero.sharding import Rectangle

_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_WORD = "embedding.word.weight"
_COMPARED_ROWS = 64


class HFWeights:
    """A Hugging Face model directory: one or several safetensors files, or pytorch_model.bin files.

    ``config``: its architecture; ``parameters``: global name → global shape; ``tokens``: the special tokens of its
    config.json; ``end_of_text``: its token, if it names one. Creating one reads headers only and checks that every
    tensor is there, in its shape, and nothing else is; ConvertError names what is not.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        raw = read_raw_config(self.directory)
        where = str(self.directory / "config.json")
        self.family: Family
        self.config: ModelConfig
        self.family, self.config = read_config(raw, where)
        self.tokens = read_tokens(raw)
        ends = self.tokens.get("eos_token_id")
        self.end_of_text: int | None = ends[0] if isinstance(ends, list) else ends
        self._tensors = self._with_prefix(open_files(self.directory))
        self.parameters = shapes_of(self.config, len(self._tensors), where)
        self._sources = {name: self.family.source(name) for name in self.parameters}
        self._tied_head: Stored | None = None
        self._check()

    def dtype_of(self, name: str) -> torch.dtype:
        """As the file has it; float64 is read in float32."""
        stored = self._tensors[self._sources[name].name].dtype
        return torch.float32 if stored == torch.float64 else stored

    def read(self, name: str, box: Rectangle | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A box of a global tensor (the whole of it if none is given), on the CPU; only it is read.

        May be called from several threads.
        """
        shape, source = self.parameters[name], self._sources[name]
        box = box or Rectangle((0,) * len(shape), shape)
        slices = [slice(offset, offset + count) for offset, count in zip(box.offsets, box.shape, strict=True)]
        base = source.part * shape[0]
        slices[0] = slice(slices[0].start + base, slices[0].stop + base)
        if source.transposed:
            slices.reverse()
        value = self._tensors[source.name].read(tuple(slices))
        if name == _WORD and self._tied_head is not None:
            self._compare(value, tuple(slices))
        if source.transposed:
            value = value.t()
        return value.to(dtype).contiguous()

    def _with_prefix(self, tensors: dict[str, Stored]) -> dict[str, Stored]:
        """The tensors under the names a model with a head has; buffers are left out."""
        prefix = self.family.prefix
        bare: dict[str, str] = {}
        for name, stored in tensors.items():
            other = bare.setdefault(name.removeprefix(prefix), name)
            if other != name:
                raise ConvertError(f"{stored.file}: {name} and {other} are the same tensor; remove the wrong one")
        return {
            name if name == HEAD else prefix + name: tensors[stored]
            for name, stored in bare.items()
            if not self.family.buffers.fullmatch(name)
        }

    def _check(self) -> None:
        wanted: dict[str, tuple[int, ...]] = {}
        for name, source in self._sources.items():
            wanted[source.name] = source.shape(self.parameters[name])
        missing = [name for name in wanted if name not in self._tensors]
        tied = self.config.tie_word_embeddings and HEAD in self._tensors
        unexpected = [name for name in self._tensors if name not in wanted and not (tied and name == HEAD)]
        for what, names in (("missing", missing), ("unexpected", unexpected)):
            if names:
                more = f" and {len(names) - 4} more" if len(names) > 4 else ""
                hint = ""
                if HEAD in missing:
                    hint = "; if its head is its word embedding, config.json must say tie_word_embeddings true"
                raise ConvertError(
                    f"{self.directory}: tensors {what} for a {self.family.model_type} model of its config.json: "
                    f"{', '.join(names[:4])}{more}{hint}"
                )
        for name, shape in (wanted | ({HEAD: wanted[self._sources[_WORD].name]} if tied else {})).items():
            stored = self._tensors[name]
            if stored.shape != shape:
                raise ConvertError(
                    f"{stored.file}: {name} has shape {list(stored.shape)}, {list(shape)} follows from config.json"
                )
            if stored.dtype not in _FLOATS:
                spelled = DTYPE_NAMES.get(stored.dtype, stored.dtype)
                raise ConvertError(f"{stored.file}: {name} is of dtype {spelled}, which is not supported")
        if tied:
            self._check_tied()

    def _check_tied(self) -> None:
        """Old files hold the head beside the embedding; it must then be the same.

        Ends of the vocabulary now, where another head would show; every row when it is read, so that a rank that needs
        a part of the embedding reads no more than that part twice.
        """
        self._tied_head = self._tensors[HEAD]
        rows, columns = self._tied_head.shape
        for first in {0, max(0, rows - _COMPARED_ROWS)}:
            index = (slice(first, min(rows, first + _COMPARED_ROWS)), slice(0, columns))
            self._compare(self._tensors[self._sources[_WORD].name].read(index), index)

    def _compare(self, word: torch.Tensor, index: tuple[slice, ...]) -> None:
        assert self._tied_head is not None
        head = self._tied_head.read(index)
        if not ((word == head) | (word.isnan() & head.isnan())).all():
            raise ConvertError(
                f"{self._tied_head.file}: {HEAD} differs from the word embedding, but config.json says "
                "tie_word_embeddings; it must say false there"
            )


def read_raw_config(directory: Path) -> dict[str, Any]:
    """The parsed config.json of a Hugging Face directory; ConvertError where there is none."""
    path = directory / "config.json"
    if not directory.is_dir():
        if directory.exists():
            raise ConvertError(f"{directory}: is a file; give the directory it is in")
        raise ConvertError(f"{directory}: no such directory; models of the hub must be downloaded first")
    hint = (
        "; the models of this cache are in snapshots/, one directory each" if (directory / "snapshots").is_dir() else ""
    )
    return read_json(path, f"{directory}: holds no config.json, so it is not a Hugging Face model directory{hint}")
