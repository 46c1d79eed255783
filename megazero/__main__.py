"""The command `megazero`, also `python -m megazero`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megazero.errors import CommandLine
from megazero.launch import main as launch


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit code."""
    parser = CommandLine(prog="megazero", description="Pretrain GPT models in parallel.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    launch.add_arguments(commands.add_parser("launch", help=launch.SUMMARY, description=launch.SUMMARY))
    return launch.run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
