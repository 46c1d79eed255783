"""What a file may hold that it should not: flipped bits, wrong lengths, huge numbers, deep nesting, false names.

Everything is drawn from a ``random.Random``, so that a case is known by its seed.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
from pathlib import Path
from typing import Any

NUMBERS: tuple[Any, ...] = (
    0,
    1,
    -1,
    2,
    3,
    255,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
)
NUMBERS += (10**30, -(10**400), 10**400, 0.5, -0.0, 1e-320, 1e308, math.nan, math.inf, -math.inf)
TEXTS = (
    "",
    ".",
    "..",
    "../outside",
    "/etc/passwd",
    "a/b",
    "~",
    "a\0b",
    "\ud800",
    "ä",
    "x" * 300,
    "x" * 100_000,
    "-1",
    "1e400",
)
TEXTS += (
    "nan",
    "9" * 5000,
    "true",
    "auto",
    "%s%n",
    "$(touch outside)",
    "`touch outside`",
    "; touch outside",
    "\x1b[2J",
    "\n",
)
_DEEP, _BOMB, _LOOP = "@deep:", "@bomb@", "@loop@"


def flat(draw: random.Random, content: bytes) -> bytes:
    """Bytes, with one to three faults."""
    for _ in range(draw.randint(1, 3)):
        content = draw.choice(_BYTES)(draw, content)
    return content


def _flip(draw: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 20)) if changed else 0):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.choice((0, 1, 8, len(content) // 2, max(0, len(content) - 1), draw.randint(0, len(content))))]


def _longer(draw: random.Random, content: bytes) -> bytes:
    return content + draw.choice((b"\0", b"\n", b"\xff" * 8, b"\0" * 4096, content[:4096]))


def _without(draw: random.Random, content: bytes) -> bytes:
    at = draw.randint(0, len(content))
    return content[:at] + content[at + draw.choice((1, 2, 8, 64)) :]


def _with(draw: random.Random, content: bytes) -> bytes:
    at = draw.randint(0, len(content))
    some = draw.choice((draw.randbytes(8), content[at : at + 32], str(draw.choice(TEXTS)).encode("utf-8", "replace")))
    return content[:at] + some + content[at:]


def _number(draw: random.Random, content: bytes) -> bytes:
    """A number of four or eight bytes over some of it, more often near the beginning."""
    width, value = draw.choice((4, 8)), draw.choice((0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1))
    at = draw.randint(0, draw.choice((len(content), min(len(content), 64))))
    return content[:at] + (value % 256**width).to_bytes(width, "little") + content[at + width :]


_BYTES = (_flip, _flip, _cut, _longer, _without, _with, _number, _number)


def tree(draw: random.Random, value: Any) -> Any:
    """A copy of what JSON can hold, with one to three places changed; ``written`` knows what to make of it."""
    holder = [copy.deepcopy(value)]
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        _change(draw, *draw.choice(_places(holder)))
    return holder[0]


def _places(node: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    found, left = [], [node]
    while left:
        node = left.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        found += [(node, key) for key in keys]
        left += [node[key] for key in keys]
    return found


def _change(draw: random.Random, container: Any, key: Any) -> None:
    kind, value = draw.randrange(12), container[key]
    if kind == 0:
        del container[key]
        if not container:
            container.append(None) if isinstance(container, list) else container.update({"": None})
    elif kind == 1 and isinstance(container, dict):
        container[str(draw.choice((*TEXTS, *container, "unknown")))] = container.pop(key)
    elif kind == 2 and isinstance(value, int) and not isinstance(value, bool):
        container[key] = value + draw.choice((-1, 1, 7, 2**31))
    elif kind == 3:
        container[key] = draw.choice(([], {}, [value], {"a": value}, [value] * 3, [0] * 1000, str(value)[:100]))
    elif kind == 4:
        container[key] = draw.choice((f"{_DEEP}{draw.choice((10, 100, 3000, 100_000))}@", _BOMB, _LOOP))
    elif kind == 5:
        other, place = draw.choice(_places([container]))
        container[key] = copy.deepcopy(other[place])
    elif kind <= 8:
        container[key] = draw.choice(NUMBERS)
    else:
        container[key] = draw.choice((*TEXTS, None, True, False))


def written(value: Any, yaml: bool = False) -> str:
    """JSON, with what JSON's writer cannot write; ``yaml``: and with YAML's own ways to be large or endless."""
    text = json.dumps(value, indent=1 if yaml else None)
    while (at := text.find(f'"{_DEEP}')) >= 0:
        end = text.index('"', at + 1)
        depth = int(text[at + 1 + len(_DEEP) : end - 1])
        text = f"{text[:at]}{'[' * depth}{']' * depth}{text[end + 1 :]}"
    doubled = ", ".join(f"&b{level} [{', '.join([f'*b{level - 1}'] * 9)}]" for level in range(1, 30))
    text = text.replace(f'"{_BOMB}"', f"[&b0 [lol], {doubled}]" if yaml else "[" + "[0]," * 20_000 + "0]")
    return text.replace(f'"{_LOOP}"', "&loop {again: *loop}" if yaml else "{" + '"a":{' * 500 + "}" * 501)


def kind_of_file(draw: random.Random, path: Path, pipes: bool) -> None:
    """Something else under its name: nothing, a directory, a link to nowhere or itself, a terabyte of zeros, or, with
    ``pipes``, a pipe that nobody writes to."""
    path.unlink()
    kind = draw.randrange(6 if pipes else 5)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.symlink_to("nowhere")
    elif kind == 2:
        path.symlink_to(path.name)
    elif kind == 3:
        with path.open("wb") as file:
            file.truncate(2**40)
    elif kind == 5:
        os.mkfifo(path)
