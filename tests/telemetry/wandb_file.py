"""Reads a W&B .wandb file: LevelDB's log format with a seven-byte header of its own, records of protobuf."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, struct.Struct("<IHB")
FULL, LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """Every record of the file, as wandb's protobuf message."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while position + HEADER.size <= len(data):
        if BLOCK - position % BLOCK < HEADER.size:
            position += BLOCK - position % BLOCK
            continue
        _, size, kind = HEADER.unpack_from(data, position)
        position += HEADER.size
        parts += data[position : position + size]
        position += size
        if kind in (FULL, LAST):
            yield Record.FromString(parts)
            parts = b""


def read_run(path: Path) -> tuple[str, dict[str, Any], dict[int, dict[str, Any]]]:
    """(run id, config, metrics by step)."""
    run_id, config, series = "", {}, {}
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run_id = record.run.run_id
            updates = record.run.config.update
        elif kind == "config":
            updates = record.config.update
        else:
            updates = ()
        config.update({item.key: json.loads(item.value_json) for item in updates})
        if kind == "history":
            row = {item.nested_key[0] or item.key: json.loads(item.value_json) for item in record.history.item}
            series.setdefault(row.pop("_step"), {}).update({k: v for k, v in row.items() if k[0] != "_"})
    return run_id, config, series
