"""zero_to_fp32.py: the script beside an engine's checkpoints that makes whole weights of them, where DeepSpeed has its.

CHECKPOINT_DIR/zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR [--tag TAG] [--max_shard_size 5GB]
    [--exclude_frozen_parameters]
"""

from __future__ import annotations

from pathlib import Path

from megazero.checkpoint import files
from megazero.checkpoint.tagged import TaggedWriter
from megazero.errors import CommandLine
from megazero.foreign.consolidate import consolidate

NAME = "zero_to_fp32.py"

_SCRIPT = '''#!/usr/bin/env python3
"""Whole float32 weights of the checkpoint here, as safetensors: zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR"""

import sys

sys.path.append({root!r})  # where megazero was when this was saved; one that is installed comes first

from megazero.foreign.recover import main

if __name__ == "__main__":
    main()
'''


class WriterWithScript(TaggedWriter):
    """Leaves the script in the directory of the checkpoints, unless it is there."""

    def _committed(self, target: Path, step: int) -> None:
        super()._committed(target, step)
        path = self.root / NAME
        if not path.exists():
            files.replace_file(path, _SCRIPT.format(root=str(Path(__file__).resolve().parents[2])).encode())
            path.chmod(0o755)


def main() -> None:
    """What the script does; a mistake is one line, and exit code 2."""
    from megazero.launch.errors import report_errors

    parser = CommandLine(prog=NAME, description="Whole float32 weights of an engine's checkpoint.")
    add = parser.add_argument
    add("checkpoint_dir", type=Path, help="the directory given to save_checkpoint")
    add("output_dir", type=Path, help="missing or empty; gets model.safetensors")
    add("-t", "--tag", help="which checkpoint of that directory (default: the one that its file latest names)")
    add("--max_shard_size", default="5GB", metavar="SIZE", help="bytes of one file at most (default: 5GB)")
    add("--exclude_frozen_parameters", action="store_true", help="only the parameters that were trained")
    add("-d", "--debug", action="store_true", help="taken, and without effect: there is nothing to debug with it")
    add("--safe_serialization", action="store_true", help="safetensors, which is what is written in any case")
    asked = parser.parse_args()
    with report_errors():
        source = asked.checkpoint_dir / asked.tag if asked.tag else asked.checkpoint_dir
        size, frozen = asked.max_shard_size, asked.exclude_frozen_parameters
        print(consolidate(source, asked.output_dir, "float32", size, exclude_frozen=frozen), flush=True)
