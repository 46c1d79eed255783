"""Weights of a Hugging Face directory, read box by box under our names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import torch

from megazero.convert.configs import read_config
from megazero.convert.families import HEAD, Family
from megazero.errors import ConvertError
from megazero.models.config import ModelConfig
from megazero.models.parameters import parameter_shapes
from megazero.sharding import Rectangle

Slices = tuple[slice, ...]
_FLOATS = {"F64", "F32", "F16", "BF16", torch.float64, torch.float32, torch.float16, torch.bfloat16}
_COMPARED_ROWS = 4096


class _Stored:
    """One tensor in a file: its shape, its dtype as the file spells it, and a way to read a slice."""

    def __init__(self, file: Path, shape: tuple[int, ...], dtype: object, read: Callable[[Slices], torch.Tensor]):
        self.file, self.shape, self.dtype, self.read = file, shape, dtype, read


class HFWeights:
    """A Hugging Face model directory: one or several safetensors files, or pytorch_model.bin files.

    ``config``: its architecture; ``parameters``: global name → global shape; ``end_of_text``: its token, if it
    names one. Creating one reads headers only and checks that every tensor is there, in its shape, and nothing
    else is; ConvertError names what is not.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        raw = read_raw_config(self.directory)
        where = str(self.directory / "config.json")
        self.family: Family
        self.config: ModelConfig
        self.family, self.config = read_config(raw, where)
        self.parameters = parameter_shapes(self.config)
        ends = raw.get("eos_token_id")
        self.end_of_text: int | None = ends[0] if isinstance(ends, list) and ends else ends
        self._tensors = self._with_prefix(_open_files(self.directory))
        self._sources = {name: self.family.source(name) for name in self.parameters}
        self._check()

    def read(self, name: str, box: Rectangle | None = None) -> torch.Tensor:
        """A box of a global tensor (the whole of it if none is given): float32, on the CPU; only it is read."""
        shape, source = self.parameters[name], self._sources[name]
        box = box or Rectangle((0,) * len(shape), shape)
        slices = [slice(offset, offset + count) for offset, count in zip(box.offsets, box.shape, strict=True)]
        base = source.part * shape[0]
        slices[0] = slice(slices[0].start + base, slices[0].stop + base)
        if source.transposed:
            slices.reverse()
        stored = self._tensors[source.name]
        try:
            value = stored.read(tuple(slices))
        except (OSError, safetensors.SafetensorError, RuntimeError) as error:
            raise ConvertError(f"{stored.file}: {source.name} cannot be read: {error}") from error
        if source.transposed:
            value = value.t()
        # Never a view of the file: the caller may change it.
        return value.to(torch.float32, copy=True, memory_format=torch.contiguous_format)

    def _with_prefix(self, tensors: dict[str, _Stored]) -> dict[str, _Stored]:
        """The tensors under the names a model with a head has; buffers are left out."""
        prefix, bare = self.family.prefix, {}
        if any(name.startswith(prefix) for name in tensors):
            bare = {name.removeprefix(prefix): name for name in tensors}
        else:
            bare = {name: name for name in tensors}
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
        for name, shape in wanted.items():
            stored = self._tensors[name]
            if stored.shape != shape:
                raise ConvertError(
                    f"{stored.file}: {name} has shape {list(stored.shape)}, {list(shape)} follows from config.json"
                )
            if stored.dtype not in _FLOATS:
                raise ConvertError(f"{stored.file}: {name} is of dtype {stored.dtype}, which is not supported")
        if tied:
            self._check_tied()

    def _check_tied(self) -> None:
        """Old files hold the head beside the embedding; it must then be the same."""
        word, head = self._tensors[self._sources["embedding.word.weight"].name], self._tensors[HEAD]
        same = word.shape == head.shape
        for row in range(0, word.shape[0] if same else 0, _COMPARED_ROWS):
            rows = (slice(row, row + _COMPARED_ROWS), slice(None))
            same = same and torch.equal(word.read(rows), head.read(rows))
        if not same:
            raise ConvertError(
                f"{self.directory}: config.json says tie_word_embeddings, but {HEAD} differs from the word embedding"
            )


def read_raw_config(directory: Path) -> dict[str, Any]:
    """The parsed config.json of a Hugging Face directory; ConvertError where there is none."""
    path = directory / "config.json"
    if not directory.is_dir():
        raise ConvertError(f"{directory}: no such directory; models of the hub must be downloaded first")
    return _read_json(path, f"{directory}: holds no config.json, so it is not a Hugging Face model directory")


def _read_json(path: Path, missing: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConvertError(missing) from None
    except (OSError, ValueError) as error:
        raise ConvertError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConvertError(f"{path}: not a JSON object")
    return value


def _open_files(directory: Path) -> dict[str, _Stored]:
    for name, opener in (("model.safetensors", _open_safetensors), ("pytorch_model.bin", _open_bin)):
        single, index = directory / name, directory / f"{name}.index.json"
        if single.exists():
            return opener(single)
        if index.exists():
            files = sorted(set(_read_json(index, "").get("weight_map", {}).values()))
            lost = [file for file in files if not (directory / file).exists()]
            if lost or not files:
                raise ConvertError(f"{index}: names {', '.join(lost[:4]) or 'no file'}, missing in {directory}")
            return {key: stored for file in files for key, stored in opener(directory / file).items()}
    raise ConvertError(f"{directory}: holds neither model.safetensors nor pytorch_model.bin, whole or in shards")


def _open_safetensors(path: Path) -> dict[str, _Stored]:
    try:
        file = safetensors.safe_open(path, framework="pt")
        keys = list(file.keys())
    except (OSError, safetensors.SafetensorError) as error:
        raise ConvertError(f"{path}: {_unreadable(path)} ({error})") from error
    found = {}
    for key in keys:
        part = file.get_slice(key)
        found[key] = _Stored(path, tuple(part.get_shape()), part.get_dtype(), part.__getitem__)
    return found


def _open_bin(path: Path) -> dict[str, _Stored]:
    try:
        # Mapped, so that only what is asked for is read; old files are no zip archive and cannot be.
        zipped = _starts_with(path, b"PK")
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:
        raise ConvertError(f"{path}: {_unreadable(path)} ({str(error).splitlines()[0]})") from error
    return {
        key: _Stored(path, tuple(tensor.shape), tensor.dtype, tensor.__getitem__)
        for key, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor)
    }


def _unreadable(path: Path) -> str:
    if path.is_file() and _starts_with(path, b"version https://git-lfs"):
        return "a Git LFS pointer, not the weights: fetch them with git lfs pull"
    return "damaged or cut short"


def _starts_with(path: Path, prefix: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(prefix)) == prefix
