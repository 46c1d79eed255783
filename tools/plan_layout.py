"""The fastest layouts of a model on a number of GPUs, before one is taken: memory and time of every layout that the
rules allow, a ranked table, why the rest was rejected, and a launch script.

    python tools/plan_layout.py --model llama3-8b --gpus 64 --gpu h100
    python tools/plan_layout.py --model my-model.yaml --gpus 8 --gpu my-chip.yaml --script run.sh

Other settings are those of pretrain/gpt.py, e.g. --train.grad_dtype bf16; what the search chooses (tp, pp, virtual_pp,
zero.stage, micro_batch_size, recompute) cannot be given. docs/plan.md says what the figures rest on.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from data.command_line import run_script
from megazero.config import Config
from megazero.config_cli import parse_flags, read_file
from megazero.config_rules import divisors
from megazero.config_tree import merged
from megazero.errors import CommandLine, ConfigError, LaunchError, near
from megazero.planner.adapters import search_adapters
from megazero.planner.chips import CHIPS, Chip, load_chip
from megazero.planner.memory import amount
from megazero.planner.search import Plan, Rejection, Search, search
from megazero.presets import PRESETS
from megazero.restore import resolve_model
from tools.layout_runs import check_counts, check_outputs

ROOT = Path(__file__).resolve().parents[1]
CHOSEN = {
    "parallel": ("tp", "pp", "virtual_pp", "partition", "schedule"),
    "zero": ("stage",),
    "train": ("micro_batch_size", "recompute"),
}
IN_ENVIRONMENT = {"model.preset", "data.seq_length", "train.global_batch_size", "train.steps"}
MOST_GPUS = 1 << 20
LONGEST = 8192  # tokens of a sequence, where none is given
TOKENS_PER_STEP = 1 << 22  # where no batch is given
OFF_DEVICE = ("host", "files")
TOKENS_PER_GPU = 1024  # and, on thousands of GPUs, at least so many on each


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument(
        "--model", required=True, help="a preset, a YAML or JSON file of settings, or a Hugging Face directory"
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs of all machines together")
    parser.add_argument("--gpu", required=True, help=f"{', '.join(CHIPS)}, or a YAML or JSON file")
    parser.add_argument("--seq-length", type=int, metavar="TOKENS", help=f"(default: the model's, up to {LONGEST})")
    parser.add_argument(
        "--global-batch-size", type=int, metavar="SAMPLES", help="per step (default: about 4 million tokens)"
    )
    parser.add_argument("--top", type=int, default=5, metavar="K", help="layouts in the table (default: 5)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument(
        "--lora", type=int, metavar="R", help="adapters of rank R on q_proj and v_proj, the rest frozen (docs/plan.md)"
    )
    parser.add_argument("--script", type=Path, metavar="FILE", help="write a script that launches the first layout")
    parser.add_argument(
        "--dry-run",
        type=int,
        metavar="RANK",
        help="build and run this rank of the first layout without hardware, and compare with the plan",
    )
    arguments, settings = parser.parse_beside_settings(argv)
    check_counts(arguments, "gpus", "top", "seq_length", "global_batch_size")
    check_outputs(arguments, "script")
    if arguments.gpus > MOST_GPUS:
        raise ConfigError.single("--gpus", f"{arguments.gpus} are more than the {MOST_GPUS} that can be planned for")
    if arguments.lora is not None and arguments.script:
        told = (
            "writes no script with --lora; examples/recipes/llama3.1-8b-lora.sh takes the layout from the environment"
        )
        raise ConfigError.single("--script", told)
    if arguments.dry_run is not None and not 0 <= arguments.dry_run < arguments.gpus:
        last = arguments.gpus - 1
        raise ConfigError.single("--dry-run", f"there is no rank {arguments.dry_run}: ranks go from 0 to {last}")
    return arguments, settings


def model_tree(name: str) -> dict[str, Any]:
    """The settings that ``--model`` stands for."""
    path = Path(name)
    if name in PRESETS:
        return {"model": {"preset": name}}
    if path.is_dir():
        return {"model": {"init_from": name}}
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        try:
            tree = read_file(name)
        except ConfigError as error:
            raise ConfigError([("--model", message) for _, message in error.problems]) from error
        if "model" not in tree:
            raise ConfigError.single("--model", f"{name} has no section `model`, as in  model: {{preset: llama3-8b}}")
        return tree
    close = near(name.lower(), list(PRESETS), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(PRESETS)}"
    raise ConfigError.single("--model", f"{name!r} is no preset, settings file or directory; {hint}")


def given_settings(arguments: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    """The tree of what the user has said, less what the search chooses. Raises ConfigError."""
    config_file, tree, found = parse_flags(flags, Config)
    if config_file is not None:
        found.append(("--config", f"give the file as --model {config_file}"))
    found += [
        (f"{section}.{name}", "is what the search chooses; leave it out")
        for section, names in CHOSEN.items()
        for name in names
        if name in tree.get(section, {})
    ]
    if found:
        raise ConfigError(found)
    tree = merged(model_tree(arguments.model), tree)
    no_sections = [(name, value) for name, value in tree.items() if not isinstance(value, dict)]
    if no_sections:
        raise ConfigError([(name, f"{value!r} is not a section with fields") for name, value in no_sections])
    for section, names in CHOSEN.items():
        if section in tree:
            tree[section] = {name: value for name, value in tree[section].items() if name not in names}
    if arguments.seq_length is not None:
        tree = merged(tree, {"data": {"seq_length": arguments.seq_length}})
    if arguments.global_batch_size is not None:
        tree = merged(tree, {"train": {"global_batch_size": arguments.global_batch_size}})
    return tree


def base_config(tree: dict[str, Any], gpus: int) -> Config:
    """The settings that all layouts share; lengths that were not given are filled in."""
    tree = {section: fields for section, fields in tree.items() if section not in ("checkpoint", "log")}
    # The search chooses the stage; the rules of what is kept off the device want one that allows it.
    devices = dict(_leaves(tree.get("zero", {})))
    for least, name in ((3, "offload_param.device"), (1, "offload_optimizer.device")):
        if devices.get(name, "none") != "none":
            tree = merged({"zero": {"stage": least}}, tree)
    # A length of its own must not be found too long for the model before the model is known.
    length = {} if "seq_length" in tree.get("data", {}) else {"data": {"seq_length": 1}}
    config = resolve_model(Config.from_dict(merged(tree, length)))
    if length:
        tokens = min(LONGEST, config.model.max_position_embeddings)
        config = config.model_copy(update={"data": config.data.model_copy(update={"seq_length": tokens})})
    if "global_batch_size" not in tree.get("train", {}):
        batch = default_batch(gpus, config.data.seq_length)
        config = config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": batch})})
    if found := config.problems():
        raise ConfigError(found)
    return config


def default_batch(gpus: int, seq_length: int) -> int:
    """Samples of about TOKENS_PER_STEP that every division of the GPUs can share, in micro-batches of many sizes."""
    samples = max(1, max(TOKENS_PER_STEP, TOKENS_PER_GPU * gpus) // seq_length)
    if gpus <= samples:
        each = -(-samples // gpus)
        multiple = 1 << max(0, (each // 16).bit_length() - 1)
        return -(-each // multiple) * multiple * gpus
    return max(divisor for divisor in divisors(gpus) if divisor <= samples)


def table(found: Search, chip: Chip) -> Table:
    """The ranked layouts; shares are of the step's time."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("tp", "pp", "dp", "zero", "micro-batch", "recompute", "tokens/s per GPU", "MFU", "step s"):
        shown.add_column(heading, justify="left" if heading == "recompute" else "right")
    for heading in ("peak GB", "compute", "tp", "pipeline", "dp", "optimizer"):
        shown.add_column(heading, justify="right")
    for heading in ("offload", "host GB", "files GB") if found.plans[0].memory.host else ():
        shown.add_column(heading, justify="right")
    for plan in found.plans:
        choice, time = plan.choice, plan.time
        virtual = f" x {choice.virtual}" if choice.virtual > 1 else ""
        parts = (time.compute, time.tensor_parallel, time.pipeline, time.data_parallel, time.optimizer)
        shown.add_row(
            str(choice.tp),
            f"{choice.pp}{virtual}",
            str(choice.dp),
            str(choice.zero),
            str(choice.micro_batch),
            choice.recompute,
            f"{plan.tokens_per_second:,.0f}",
            f"{plan.mfu:.1%}",
            f"{time.seconds:.2f}",
            f"{plan.memory.peak / 1e9:.1f} of {chip.usable_memory() / 1e9:.1f}",
            *(f"{part / time.seconds:.0%}" for part in parts),
            *_offloaded(plan),
        )
    return shown


def _offloaded(plan: Plan) -> list[str]:
    """What is kept off the device: share of the step's time, GB of host memory, GB of files."""
    host = plan.memory.host
    if host is None:
        return []
    return [f"{plan.time.offload / plan.time.seconds:.0%}", f"{host.memory / 1e9:.1f}", f"{host.on_disk / 1e9:.1f}"]


def rejected_lines(rejected: Sequence[Rejection], examples: int = 3) -> Iterator[str]:
    """How many were rejected for each reason, and those that came nearest."""
    kinds: dict[str, list[Rejection]] = defaultdict(list)
    for rejection in rejected:
        kinds[rejection.kind].append(rejection)
    for kind, those in sorted(kinds.items(), key=lambda item: -len(item[1])):
        memory = kind in ("memory", "host memory")
        what = f"do not fit in {kind}; nearest" if memory else f"break the rules of {kind}; e.g."
        yield f"{len(those)} {what}:"
        for rejection in sorted(those, key=lambda rejection: (rejection.lacks, rejection.choice))[:examples]:
            choice = rejection.choice if memory else f"tp={rejection.choice.tp} pp={rejection.choice.pp}"
            yield f"  {choice}: {rejection.reason}"


def as_json(found: Search, config: Config, arguments: argparse.Namespace, chip: Chip) -> dict[str, Any]:
    """All that was found, in bytes and seconds."""
    return {
        "model": arguments.model,
        "gpus": arguments.gpus,
        "gpu": chip.name,
        "seq_length": config.data.seq_length,
        "global_batch_size": config.train.global_batch_size,
        "usable_memory": chip.usable_memory(),
        "plans": [
            {
                **plan.choice._asdict(),
                "tokens_per_second_per_gpu": plan.tokens_per_second,
                "mfu": plan.mfu,
                "time": vars(plan.time),
                "memory": {
                    "rank": plan.memory.rank,
                    "peak": plan.memory.peak,
                    "state": plan.memory.state.total,
                    "activations": plan.memory.activations,
                    "buffers": plan.memory.buffers,
                    "host": plan.memory.host.memory if plan.memory.host else 0,
                    "files": plan.memory.host.on_disk if plan.memory.host else 0,
                },
            }
            for plan in found.plans
        ],
        "fitting": found.fitting,
        "rejected": [{**rejection.choice._asdict(), "reason": rejection.reason} for rejection in found.rejected],
    }


def launch_script(plan: Plan, arguments: argparse.Namespace, tree: dict[str, Any], chip: Chip) -> str:
    """A script of the kind in examples/: the layout from the environment, with the plan's as defaults."""
    gpus, near, choice = arguments.gpus, chip.gpus_per_node, plan.choice
    if gpus > near and gpus % near:
        raise LaunchError(f"--script: {gpus} GPUs are not whole machines of {near}; use a multiple of {near}")
    preset = tree["model"].get("preset")
    environment = {
        **{"TP": choice.tp, "PP": choice.pp, "VPP": choice.virtual, "ZERO": choice.zero},
        **{"MBS": choice.micro_batch, "RECOMPUTE": choice.recompute},
        **{"GBS": plan.config.train.global_batch_size, "NPROC": min(gpus, near), "SEQ": plan.config.data.seq_length},
    }
    if preset is not None:
        environment["MODEL"] = preset
    if "steps" in tree.get("train", {}):
        environment["STEPS"] = tree["train"]["steps"]
    flags = [*script_flags(tree)]
    nodes = -(-gpus // near)
    name = arguments.script.name
    start = f"sbatch {name}" if nodes > 1 else f"bash {name}"
    slurm = "".join(slurm_lines(nodes, near)) if nodes > 1 else ""
    recipe = "slurm.sbatch" if nodes > 1 else "one_node.sh"
    exports = "\n".join(f'export {key}="${{{key}:-{value}}}"' for key, value in environment.items())
    return f"""#!/usr/bin/env bash
# {arguments.model} on {gpus} x {chip.name}: {choice}.
# Planned: {plan.tokens_per_second:,.0f} tokens/s per GPU, {plan.mfu:.1%} MFU, {amount(plan.memory.peak)} at most.
#   DATA=PREFIX OUT=DIRECTORY STEPS=1000 {start}
# The variables below, set by you, win over the plan; examples/recipe.sh has them all.
{slurm}set -euo pipefail
ROOT={shlex.quote(str(ROOT))}
cd "$ROOT"
{exports}
{'export SLURM_SUBMIT_DIR="$ROOT"' + chr(10) if nodes > 1 else ""}\
exec bash "$ROOT/examples/{recipe}" {shlex.join(flags)} "$@"
"""


def slurm_lines(nodes: int, gpus_per_node: int) -> Iterator[str]:
    """What examples/slurm.sbatch asks of Slurm, for so many nodes."""
    changes = {"--nodes": nodes, "--gpus-per-node": gpus_per_node}
    for line in (ROOT / "examples" / "slurm.sbatch").read_text().splitlines():
        if line.startswith("#SBATCH "):
            name = line.split()[1].partition("=")[0]
            yield f"#SBATCH {name}={changes[name]}\n" if name in changes else f"{line}\n"


def script_flags(tree: dict[str, Any]) -> Iterator[str]:
    """What recipes do not take from the environment."""
    if tree["model"].get("preset") is None:
        yield from ("--model.preset", "none")
    yield from setting_flags(tree)


def setting_flags(tree: dict[str, Any]) -> Iterator[str]:
    """The settings of ``tree`` as flags, less those that recipes take from the environment."""
    for path, value in _leaves(tree):
        if path not in IN_ENVIRONMENT and value is not None:
            if path == "model.init_from":
                value = str(Path(value).resolve())
            yield from (f"--{path}", *map(_written, value if isinstance(value, list | tuple) else [value]))


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def write(path: Path, text: str) -> None:
    """A file that was asked for."""
    path.write_text(text)
    print(f"wrote {path}", file=sys.stderr)


def dry_run_lines(plan: Plan, gpus: int, rank: int, lora: int | None) -> Iterator[str]:
    """What was counted beside what is planned. Raises LaunchError where they differ."""
    # torch's distributed package, transformers and peft take seconds to load.
    if lora is None:
        from megazero.planner.dry_run import dry_run, planned

        counted, expected = dry_run(plan.config, gpus, rank), planned(plan.config, gpus, rank)
    else:
        from megazero.planner.dry_adapters import adapters_dry_run, adapters_planned

        counted, expected = (run(plan.config, gpus, rank, lora) for run in (adapters_dry_run, adapters_planned))
    place = ", ".join(f"{axis} {at}" for axis, at in plan.config.layout(gpus).coordinates(rank).items())
    yield f"rank {rank} ({place}), built and run on paper:"
    yield f"  model state: {counted.state:,} B, planned {expected.state:,} B"
    for what, found, wanted in (
        ("host memory", counted.host, expected.host),
        ("files", counted.files, expected.files),
    ):
        if found or wanted:
            yield f"  {what}: {found:,} B, planned {wanted:,} B"
    for route in sorted(counted.traffic.keys() | expected.traffic.keys()):
        found, wanted = counted.traffic[route], expected.traffic[route]
        if route.group in OFF_DEVICE:
            yield f"  {route.group} {route.kind}: {found:,} B a step, planned {wanted:,} B"
        else:
            yield (
                f"  {route.group} {route.kind}, {route.itemsize} B an element: {found:,} elements a step, "
                f"planned {wanted:,}"
            )
    if counted != expected:
        raise LaunchError(f"the dry run of rank {rank} differs from the plan: that is a mistake in the planner")


def main() -> None:
    arguments, flags = parse_arguments(sys.argv[1:])
    chip = load_chip(arguments.gpu)
    tree = given_settings(arguments, flags)
    config = base_config(tree, arguments.gpus)
    if arguments.lora is None:
        found = search(config, arguments.gpus, chip, arguments.top)
    else:
        found = search_adapters(config, arguments.gpus, chip, arguments.lora, arguments.top)
    if arguments.json:
        print(json.dumps(as_json(found, config, arguments, chip)))
    else:
        console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
        tokens = config.train.global_batch_size * config.data.seq_length
        console.print(
            f"{arguments.model} on {arguments.gpus} x {chip.name}, {config.train.global_batch_size} sequences of "
            f"{config.data.seq_length} per step ({tokens / 1e6:.1f} million tokens): {found.fitting} layouts fit\n"
        )
        if found.plans:
            console.print(table(found, chip))
        for line in rejected_lines(found.rejected):
            console.print(line, markup=False, soft_wrap=True)
    if not found.plans:
        raise LaunchError(
            f"--gpus: no layout of {arguments.model} fits {arguments.gpus} x {chip.name}; "
            f"{advice(found, arguments.lora is not None)}"
        )
    if arguments.script:
        write(arguments.script, launch_script(found.plans[0], arguments, tree, chip))
    if arguments.dry_run is not None:
        for line in dry_run_lines(found.plans[0], arguments.gpus, arguments.dry_run, arguments.lora):
            print(line, file=sys.stderr if arguments.json else sys.stdout)


def advice(found: Search, adapters: bool) -> str:
    """What would help where nothing fits."""
    if beyond := [rejection.lacks for rejection in found.rejected if rejection.kind == "host memory"]:
        return (
            f"the nearest lacks {amount(min(beyond))} of host memory for a GPU: keep masters and moments in files "
            "(device nvme) or in 16 bits, or say in a file for --gpu that host.memory is more"
        )
    lacking = [rejection.lacks for rejection in found.rejected if rejection.kind == "memory"]
    if lacking:
        remedies = "use more GPUs, larger ones, shorter sequences, or --train.grad_dtype bf16"
        if adapters:
            remedies = "use more GPUs, larger ones, or shorter sequences"
        return f"the nearest lacks {amount(min(lacking))} on a GPU: {remedies}"
    return "every division breaks a rule: --global-batch-size must be a multiple of dp, tp must divide the heads"


if __name__ == "__main__":
    run_script(main)
