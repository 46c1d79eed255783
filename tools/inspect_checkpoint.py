"""What a checkpoint holds, and how two differ: megazero checkpoints of any layout, Hugging Face directories.

tools/inspect_checkpoint.py [show] PATH [--verify] [--json]
tools/inspect_checkpoint.py diff A B [--tolerance ERROR] [--json]

PATH is a checkpoint, a directory of some (its newest whole one), or a directory with a config.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.command_line import run_script
from megazero.convert.compare import Difference, open_pair
from megazero.convert.contents import Contents, StoredTensor, norm, open_contents
from megazero.errors import CheckpointError, CommandLine, MegazeroError


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="each tensor's shape, dtype, norm and checksum; what the rest says")
    show.add_argument("path", metavar="PATH")
    verify_help = "read every byte, optimizer state too (default: the weights, for their norms)"
    show.add_argument("--verify", action="store_true", help=verify_help)
    diff = commands.add_parser("diff", help="relative error of each tensor; exit code 1 where two differ")
    for name in ("A", "B"):
        diff.add_argument(name.lower(), metavar=name)
    tolerance_help = "largest relative error that counts as equal (default: 0)"
    diff.add_argument("--tolerance", type=float, default=0.0, metavar="ERROR", help=tolerance_help)
    for command in (show, diff):
        command.add_argument("--json", action="store_true", help="one JSON object instead of text")
    if argv and argv[0] not in ("show", "diff", "-h", "--help"):
        argv = ["show", *argv]
    arguments = parser.parse_args(argv)
    if arguments.command == "diff" and not 0 <= arguments.tolerance < math.inf:
        diff.error("--tolerance must be a number of at least 0")
    return arguments


def show(path: str, verify: bool, as_json: bool) -> None:
    """Prints the facts, then a line per tensor as it is read. CheckpointError at the end where any is damaged."""
    contents = open_contents(path)
    if not as_json:
        print_facts(contents)
        print(f"{'tensor':{_width(contents)}}  {'norm':>12}  checksum  dtype     shape, and where it is", flush=True)
    rows, damage = [], []
    for tensor in contents.tensors:
        row = describe(tensor, contents.has_checksums, read=verify or tensor.kind == "weight")
        rows.append(row)
        damage += [row["damage"]] if "damage" in row else []
        if not as_json:
            print_row(row, _width(contents), contents.facts["files"])
    if verify:
        try:
            contents.check_rest()
        except MegazeroError as error:
            damage.append(str(error))
    if as_json:
        print(json.dumps({**contents.facts, "tensors": rows, "damage": damage}, indent=1))
    if damage:
        raise CheckpointError(f"{damage[0]}{f' And {len(damage) - 1} more are damaged' if damage[1:] else ''}")
    if verify and not as_json:
        done = "every byte's checksum is right" if contents.has_checksums else "every tensor can be read; no checksums"
        print(f"verified: {done}")


def describe(tensor: StoredTensor, has_checksums: bool, read: bool) -> dict[str, Any]:
    """JSON values of one tensor.

    ``norm``: null where not read or not finite. ``checksum``: ok, damaged, unread, or none: there is none.
    """
    row: dict[str, Any] = {
        "kind": tensor.kind,
        "name": tensor.name,
        "shape": tensor.shape,
        "dtype": tensor.dtype,
        "norm": None,
        "finite": None,
        "checksum": "unread",
        "boxes": tensor.boxes,
        "files": tensor.files,
    }
    if read and tensor.readable:
        try:
            size = norm(tensor.read())
        except MegazeroError as error:
            return {**row, "checksum": "damaged", "damage": str(error)}
        row["finite"] = math.isfinite(size)
        row["norm"] = size if row["finite"] else None
        row["checksum"] = "ok" if has_checksums else "none"
    return row


def print_facts(contents: Contents) -> None:
    for name, value in contents.facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {part}" for key, part in value.items() if part is not None)
        elif isinstance(value, int):
            value = f"{value:,}"
        print(f"{name.replace('_', ' '):18}{value}")
    print()


def print_row(row: dict[str, Any], width: int, files: int) -> None:
    norm_text = "not finite" if row["finite"] is False else "" if row["norm"] is None else f"{row['norm']:.6g}"
    shape = " x ".join(map(str, row["shape"])) or "scalar"
    place = row["files"][0] if len(row["files"]) == 1 else f"{len(row['files'])} of {files} files"
    parts = f", {row['boxes']} parts" if row["boxes"] > 1 else ""
    where = f" in {place}{parts}" if row["files"] else ""
    print(f"{_label(row):{width}}  {norm_text:>12}  {row['checksum']:8}  {row['dtype']:8}  {shape}{where}", flush=True)


def _label(row: dict[str, Any]) -> str:
    return row["name"] if row["kind"] == "weight" else f"{row['kind']} of {row['name']}"


def _width(contents: Contents) -> int:
    return max((len(_label(vars(tensor))) for tensor in contents.tensors), default=0)


def diff(first: str, second: str, tolerance: float, as_json: bool) -> bool:
    """Prints every tensor's relative error; returns whether all are within the tolerance."""
    pair = open_pair(first, second)
    found = []
    if not as_json:
        for letter, side in (("A", pair.first), ("B", pair.second)):
            step = f", step {side.facts['step']:,}" if "step" in side.facts else ""
            print(f"{letter}: {side.facts['format']}, {side.facts['path']}{step}")
        for note in pair.notes:
            print(note)
    for difference in pair.differences():
        found.append(difference)
        if not as_json:
            print(f"{spelled(difference):>24}  {_label(vars(difference))}", flush=True)
    beyond = [difference for difference in found if not difference.error <= tolerance]
    if as_json:
        rows = [{**vars(d), "error": d.error if math.isfinite(d.error) else None} for d in found]
        print(json.dumps({"notes": pair.notes, "equal": not beyond, "tolerance": tolerance, "tensors": rows}, indent=1))
    else:
        largest = max(found, key=lambda d: d.error, default=None)
        ending = f"; largest: {spelled(largest)}, {_label(vars(largest))}" if largest and largest.error else ""
        print(f"{len(beyond)} of {len(found)} tensors differ by more than {tolerance:g}{ending}")
    return not beyond


def spelled(difference: Difference) -> str:
    if difference.missing:
        return f"missing in {'A' if difference.missing == 'first' else 'B'}"
    if difference.shapes:
        return " and ".join(str(list(shape)) for shape in difference.shapes)
    return f"{difference.error:.3g}" if math.isfinite(difference.error) else "not finite on one side"


def main() -> None:
    arguments = parse_arguments(sys.argv[1:])
    if arguments.command == "show":
        show(arguments.path, arguments.verify, arguments.json)
    elif not diff(arguments.a, arguments.b, arguments.tolerance, arguments.json):
        sys.exit(1)


if __name__ == "__main__":
    run_script(main)
