"""What is read from files, and a valid one of each kind to begin with.

A target has ``build(place)``, which writes valid files once; ``damage(draw, place)``, which changes a copy of them; and
``use(place)``, which does with them whatever the program would.
"""

from __future__ import annotations

import json
import random
import shutil
import zlib
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.indexed import HEADER, IndexedDataset
from data.sources import build_sources
from megazero.checkpoint import left_out, newest, open_checkpoint, save
from megazero.checkpoint.locate import latest_tagged
from megazero.config import Config, load_config
from megazero.convert import CheckpointWeights, open_weights
from megazero.convert.contents import open_contents
from megazero.ds_config.reader import read_ds_config
from megazero.engine import Engine, resolve_model
from megazero.errors import MegazeroError
from megazero.launch.environment import ProcessEnvironment
from megazero.launch.exported import FILE, exported
from megazero.launch.hosts import choose, read_hostfile
from tests.checkpoint import states
from tests.data.helpers import settings, write_dataset
from tests.engine.tiny import flags
from tests.fuzz import mutate

ORACLE = Path(__file__).resolve().parents[1] / "fixtures" / "oracle" / "llama-gqa"


@dataclass(frozen=True)
class Target:
    build: Callable[[Path], None]
    damage: Callable[[random.Random, Path], None]
    use: Callable[[Path], None]


def damaged_file(draw: random.Random, path: Path, pipes: bool = False) -> None:
    """Its bytes changed, or something else in its place. A pipe may be meant, as in ``--hostfile <(nodes)``, but not
    inside a directory that a program wrote."""
    if draw.random() < 0.15:
        mutate.kind_of_file(draw, path, pipes)
    else:
        path.write_bytes(mutate.flat(draw, path.read_bytes()))


def damaged_json(draw: random.Random, path: Path) -> None:
    text = mutate.written(mutate.tree(draw, json.loads(path.read_bytes())))
    path.write_text(text, errors="surrogatepass")


# Checkpoints: root/step_00000003, root/step_00000004, and root/latest, which names the older one.


def build_checkpoint(place: Path) -> None:
    for step in (3, 4):
        state = states.make_state(step)
        rank_state = {"rng_cpu": torch.get_rng_state()}
        meta = {**states.META, "saved_at": 1.0, "config": {"data": {"eod_id": 1}, "zero": {"stage": 0}}}
        save(place, step, states.chunks_of(state, 0, 1, 1, 1), rank_state, {**meta, "layout": {"tp": 1}})
    (place / "latest").write_text("step_00000003")


def with_checksum(body: str) -> bytes:
    """A manifest's bytes, whose checksum is right."""
    rest = body[1:].encode("utf-8", "replace") + b"\n"
    return b'{"checksum": "%08x",\n' % zlib.crc32(rest) + rest


def damage_checkpoint(draw: random.Random, place: Path) -> None:
    kind, directory = draw.random(), place / "step_00000004"
    if kind < 0.6:
        _damage_manifest(draw, directory / "manifest.json")
    elif kind < 0.8:
        damaged_file(draw, draw.choice(sorted(directory.iterdir())), pipes=True)
    else:
        tag = draw.choice((*mutate.TEXTS, "../step_00000004", "..", "../..", "step_00000004/", "\udcff"))
        (place / "latest").write_bytes(tag.encode("utf-8", "surrogatepass"))
        if draw.random() < 0.5:  # no step directory, so that latest is read
            for path in sorted(place.glob("step_*")):
                path.rename(place / path.name.replace("step_", "tag"))


def _damage_manifest(draw: random.Random, path: Path) -> None:
    body = json.loads(path.read_bytes())
    del body["checksum"]
    if draw.random() < 0.15:
        path.write_bytes(with_checksum(mutate.flat(draw, json.dumps(body).encode()).decode("utf-8", "replace")))
        return
    # A part of it first: most of the places in the whole are in the list of chunks.
    part = draw.choice(("all", "meta", "file", "state", "chunk", "parameters"))
    if part == "all":
        body = mutate.tree(draw, body)
    elif part in ("meta", "parameters"):
        body[part] = mutate.tree(draw, body[part])
    else:
        files = body["files"]
        inner = {"file": files, "state": files[0]["state"], "chunk": files[0]["chunks"]}[part]
        if part == "file":
            changed = mutate.tree(draw, [{**files[0], "chunks": [], "state": []}])
            kept = {name: files[0][name] for name in ("chunks", "state") if draw.random() < 0.9}
            if isinstance(changed, list):
                changed = [{**file, **kept} if isinstance(file, dict) else file for file in changed]
            body["files"] = changed
        else:
            at = draw.randrange(len(inner))
            inner[at] = mutate.tree(draw, inner[at])
    path.write_bytes(with_checksum(mutate.written(body)))


def use_checkpoint(place: Path) -> None:
    refused = None
    for way in (_read_checkpoint, _read_tagged, _read_weights):
        try:
            way(place)
        except MegazeroError as error:
            refused = error
    if refused is not None:
        raise refused


def _read_checkpoint(place: Path) -> None:
    with open_checkpoint(newest(place / "step_00000004")) as checkpoint:
        checkpoint.verify()
        for kind in checkpoint.kinds:
            for name in checkpoint.parameters:
                if checkpoint.has(kind, name):
                    checkpoint.read(kind, name)
        for rank in range(checkpoint.world_size):
            checkpoint.state_shapes(rank), checkpoint.rank_state(rank)


def _read_tagged(place: Path) -> None:
    path = latest_tagged(place)
    if path is not None:
        open_checkpoint(path)


def _read_weights(place: Path) -> None:
    contents = open_contents(place)
    json.dumps(contents.facts)
    for tensor in contents.tensors:
        tensor.read()
    contents.check_rest()
    weights = open_weights(place)
    assert isinstance(weights, CheckpointWeights)
    for name in weights.parameters:
        weights.read(name)


# A run's own checkpoint, resumed by an engine.


def _run_settings(place: Path) -> dict[str, Any]:
    sizes = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 16,
        "max_position_embeddings": 8,
    }
    found: dict[str, Any] = {f"model.{name}": size for name, size in sizes.items()}
    return {
        **found,
        "data.seq_length": 8,
        "train.precision": "fp32",
        "checkpoint.dir": place,
        "parallel.vocab_multiple": 1,
    }


def _engine(place: Path) -> Engine:
    """One that has resumed, where there is what to resume."""
    config = resolve_model(load_config(flags(_run_settings(place)), world_size=1, needs_data=False), 1)
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        return Engine(config, ProcessEnvironment(0, 0, 1))


def build_run(place: Path) -> None:
    with _engine(place) as engine:
        engine.save(None)
    with open_checkpoint(place) as checkpoint:
        left_out.write(place, checkpoint.meta["run_id"], [range(3), range(8, 9)])


def damage_run(draw: random.Random, place: Path) -> None:
    part = draw.choice(("meta", "meta", "state", "left out"))
    if part == "left out":
        damage = draw.choice((damaged_json, damaged_file))
        damage(draw, place / left_out.NAME)
        return
    path = next(place.glob("step_*")) / "manifest.json"
    body = json.loads(path.read_bytes())
    del body["checksum"]
    if part == "meta":
        meta = body["meta"]
        inner = draw.choice((meta, {name: value for name, value in meta.items() if name not in ("config", "model")}))
        changed = mutate.tree(draw, inner)
        body["meta"] = {**meta, **changed} if inner is not meta and isinstance(changed, dict) else changed
    else:
        body["files"][0]["state"] = mutate.tree(draw, body["files"][0]["state"])
    path.write_bytes(with_checksum(mutate.written(body)))


def use_run(place: Path) -> None:
    with _engine(place):
        pass


# Datasets: d.bin, d.idx, d.mask, d.json.


def build_dataset(place: Path) -> None:
    documents = [[1, 2, 3], [], [4] * 9, [5, 6, 7, 8], [9] * 20]
    masks = [[1] * len(document) for document in documents]
    write_dataset(place / "d", documents, masks=masks, metadata={"vocab_size": 1000, "eod_id": 3, "tokenizer": "byte"})


def damage_dataset(draw: random.Random, place: Path) -> None:
    name = draw.choice(("idx", "idx", "idx", "idx", "json", "json", "bin", "mask"))
    path = place / f"d.{name}"
    if name == "json" and draw.random() < 0.8:
        damaged_json(draw, path)
    elif name == "idx" and draw.random() < 0.7:
        path.write_bytes(_damaged_index(draw, path.read_bytes()))
    else:
        damaged_file(draw, path, pipes=True)


def _damaged_index(draw: random.Random, content: bytes) -> bytes:
    """Some of its numbers, by field, in a file that has the length it says."""
    header = list(HEADER.unpack(content[: HEADER.size]))
    sequences, boundaries = header[3:]
    starts = HEADER.size, HEADER.size + 4 * sequences, HEADER.size + 12 * sequences
    arrays = [
        np.frombuffer(content, dtype, count, start).copy()
        for dtype, count, start in zip(("<i4", "<i8", "<i8"), (sequences, sequences, boundaries), starts, strict=True)
    ]
    for _ in range(draw.randint(1, 3)):
        which = draw.randrange(4)
        if which == 3:
            field = draw.randrange(1, 5)
            header[field] = draw.choice((0, 1, 2, 3, 4, 5, 8, 200, *((2**31, 2**62, 2**64 - 1) if field > 2 else ())))
        else:
            array = arrays[which]
            top = np.iinfo(array.dtype).max
            array[draw.randrange(len(array))] = draw.choice((0, 1, -1, 2, 7, 10**6, top, -top, len(array), 40, 80))
    return HEADER.pack(*header) + b"".join(array.tobytes() for array in arrays)


def use_dataset(place: Path) -> None:
    dataset = IndexedDataset(place / "d")
    for data in (
        settings(str(place / "d"), reset_at_document=True, mask_eod=True),
        settings(str(place / "d"), split=(40, 60), seq_length=2, shuffle=True),
    ):
        for source in build_sources(data, vocab_size=1000):
            if source is not None:
                try:
                    source.read(0, 0, 1, 8, 4)
                finally:
                    source.close()
    dataset.verify()
    for index in range(len(dataset)):
        dataset[index].sum()


# Settings.


def build_config(place: Path) -> None:
    tree = Config().model_dump(mode="json")
    tree["model"] |= {"rope_scaling": {"type": "yarn", "factor": 2.0}, "position": "rotary", "num_key_value_heads": 4}
    tree["data"] |= {"train": [[0.5, "a"], [0.5, "b"]], "split": [95, 5]}
    tree["parallel"] |= {"partition": [6, 6], "pp": 2}
    tree["train"]["time_limit"], tree["checkpoint"]["dir"] = "1-02:03:04", "runs"
    (place / "config.json").write_text(json.dumps(tree))
    Config.from_dict(tree, world_size=8)


def damage_config(draw: random.Random, place: Path) -> None:
    source = place / "config.json"
    tree = json.loads(source.read_bytes())
    section = draw.choice(list(tree))
    if draw.random() < 0.7:
        tree[section] = mutate.tree(draw, tree[section])
    else:
        tree = mutate.tree(draw, tree)
    if draw.random() < 0.3:
        source.write_text(mutate.written(tree), errors="surrogatepass")
        return
    source.unlink()
    text = mutate.written(tree, yaml=True)
    if ":" in text and draw.random() < 0.3:
        kinds = "int float bool null timestamp binary set omap pairs str seq map python/object/apply:os.system".split()
        at = draw.choice([place for place, sign in enumerate(text) if sign == ":"])
        text = f"{text[: at + 1]} !!{draw.choice(kinds)} {text[at + 1 :]}"
    content = text.encode("utf-8", "surrogatepass")
    (place / "config.yaml").write_bytes(mutate.flat(draw, content) if draw.random() < 0.3 else content)


def use_config(place: Path) -> None:
    (path,) = place.glob("config.*")
    config = load_config(["--config", str(path), "--train.steps", "2000"], world_size=8)
    config.layout(8), config.schedule, config.sequence_parallel, config.model.architecture


def build_ds_config(place: Path) -> None:
    tree = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "steps_per_print": 10,
        "fp16": {"enabled": True, "initial_scale_power": 16, "loss_scale": 0, "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": False},
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": 5e8,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu", "ratio": 1.0, "buffer_count": 4, "pin_memory": True},
            "mics_shard_size": 4,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": "auto", "weight_decay": 0}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": "auto"}},
        "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]},
        "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "x"},
        "activation_checkpointing": {"partition_activations": False},
        "flops_profiler": {"enabled": False},
        "checkpoint": {"tag_validation": "Warn"},
    }
    (place / "ds.json").write_text(json.dumps(tree))


def damage_ds_config(draw: random.Random, place: Path) -> None:
    if draw.random() < 0.8:
        damaged_json(draw, place / "ds.json")
    else:
        damaged_file(draw, place / "ds.json")


def use_ds_config(place: Path) -> None:
    values = {"optimizer.params.eps": 1e-8, "scheduler.params.total_num_steps": 100}
    asdict(read_ds_config(place / "ds.json", 8, values))


# Lists of machines, and of variables for them.


def build_hostfile(place: Path) -> None:
    (place / "hosts").write_text("# two\nnode-a slots=8\nnode-b slots=4  # half\nroot@10.0.0.1 slots=2\n")
    (place / FILE).write_text("# for all\nNCCL_DEBUG=INFO\nA=b=c\n")


def damage_hostfile(draw: random.Random, place: Path) -> None:
    path = place / draw.choice(("hosts", "hosts", FILE))
    if draw.random() < 0.5:
        damaged_file(draw, path)
        return
    words = path.read_text().split(" ")
    texts = (
        *mutate.TEXTS,
        "slots=0",
        "slots=99999",
        "slots=-1",
        "-oProxyCommand=touch${IFS}outside slots=1",
        "node-a slots=1\n",
    )
    words[draw.randrange(len(words))] = draw.choice(texts)
    path.write_text(" ".join(words), errors="surrogatepass")


def use_hostfile(place: Path) -> None:
    exported({}, (), [place])
    hosts = read_hostfile(place / "hosts")
    assert all(not host.name.startswith("-") for host in hosts), "ssh would take the name for an option"
    choose(hosts, f"{hosts[0].name}:0", None, 1, None)


# Hugging Face directories, in two shards.


def build_hugging_face(place: Path) -> None:
    shutil.copy(ORACLE / "hf_init" / "config.json", place / "config.json")
    content = (ORACLE / "hf_init" / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    names, shards = sorted(header), {}
    for number, mine in enumerate((names[::2], names[1::2]), start=1):
        file, data, entries = f"model-{number:05d}-of-00002.safetensors", b"", {}
        for name in mine:
            low, high = header[name]["data_offsets"]
            entries[name] = {**header[name], "data_offsets": [len(data), len(data) + high - low]}
            data += content[8 + size + low : 8 + size + high]
            shards[name] = file
        encoded = json.dumps(entries).encode()
        (place / file).write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def damage_hugging_face(draw: random.Random, place: Path) -> None:
    kind, shard = draw.random(), place / "model-00001-of-00002.safetensors"
    if kind < 0.3:
        damaged_json(draw, place / "config.json")
    elif kind < 0.5:
        damaged_json(draw, place / "model.safetensors.index.json")
    elif kind < 0.8:
        content = shard.read_bytes()
        size = int.from_bytes(content[:8], "little")
        encoded = mutate.written(mutate.tree(draw, json.loads(content[8 : 8 + size]))).encode("utf-8", "replace")
        shard.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + size :])
    elif kind < 0.9:
        damaged_file(draw, draw.choice(sorted(place.iterdir())), pipes=True)
    else:  # the older format, in which a file is a program for the unpickler
        for path in (shard, place / "model.safetensors.index.json"):
            path.unlink()
        path = place / "pytorch_model.bin"
        torch.save({"model.norm.weight": torch.ones(4)}, path, _use_new_zipfile_serialization=draw.random() < 0.5)
        path.write_bytes(mutate.flat(draw, path.read_bytes()))


def use_hugging_face(place: Path) -> None:
    refused = None
    try:
        contents = open_contents(place)
        json.dumps(contents.facts)
        for tensor in contents.tensors:
            if tensor.readable:
                tensor.read()
    except MegazeroError as error:
        refused = error
    weights = open_weights(place)
    for name in weights.parameters:
        weights.read(name)
    if refused is not None:
        raise refused


TARGETS = {
    "checkpoint": Target(build_checkpoint, damage_checkpoint, use_checkpoint),
    "resume": Target(build_run, damage_run, use_run),
    "dataset": Target(build_dataset, damage_dataset, use_dataset),
    "config": Target(build_config, damage_config, use_config),
    "ds_config": Target(build_ds_config, damage_ds_config, use_ds_config),
    "hostfile": Target(build_hostfile, damage_hostfile, use_hostfile),
    "hugging_face": Target(build_hugging_face, damage_hugging_face, use_hugging_face),
}
