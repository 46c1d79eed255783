"""Damaged and hostile files for every reader of the project, and what came of them: a table.

    python tests/fuzz/fuzz.py [--only READER …] [--minutes M] [--seed S] [--case N]

Only the project's own errors may come out; what else does is kept under --findings, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.fuzz import guard  # noqa: E402
from tests.fuzz.readers import TARGETS  # noqa: E402


class Fuzz:
    """Cases of one reader, by number; a case is the same wherever it is run."""

    def __init__(self, name: str, seed: int, findings: Path) -> None:
        self._name, self._seed, self._findings = name, seed, findings
        self.target, self.outcomes, self.places = TARGETS[name], Counter(), Counter()
        self._root = Path(tempfile.mkdtemp(prefix=f"megazero-fuzz-{name}-"))
        self._valid = self._root / "valid"
        self._valid.mkdir()
        self.target.build(self._valid)
        self.target.use(self._valid)  # imports what it does when first used
        outcome = guard.run(self.target.use, self._valid)
        assert outcome.kind == "accepted", outcome.told

    def case(self, number: int) -> guard.Outcome:
        draw = random.Random(f"{self._seed} {self._name} {number}")
        place = self._root / "case"
        shutil.copytree(self._valid, place, symlinks=True)
        self.target.damage(draw, place)
        outcome = guard.run(self.target.use, place)
        self.outcomes[outcome.kind] += 1
        if outcome.kind == "FAULT":
            if not self.places[outcome.place]:
                self._keep(number, place, outcome)
            self.places[outcome.place] += 1
        shutil.rmtree(place)
        return outcome

    def _keep(self, number: int, place: Path, outcome: guard.Outcome) -> None:
        kept = self._findings / f"{self._name}-{self._seed}-{number}"
        kept.mkdir(parents=True)
        (kept / "told").write_text(outcome.told, errors="backslashreplace")
        print(f"FAULT {self._name} --seed {self._seed} --case {number}: {outcome.place}", flush=True)

    def close(self) -> None:
        shutil.rmtree(self._root)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", choices=[*TARGETS], default=[*TARGETS], help="these readers (default: all)"
    )
    parser.add_argument("--minutes", type=float, default=10, metavar="M", help="for each reader (default: 10)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the cases (default: 1)")
    parser.add_argument("--case", type=int, metavar="N", help="this one alone, with all it says")
    parser.add_argument(
        "--findings", type=Path, metavar="DIR", help="where to keep findings (default: a new directory)"
    )
    arguments = parser.parse_args()
    findings = arguments.findings or Path(tempfile.mkdtemp(prefix="megazero-fuzz-findings-"))
    findings.mkdir(parents=True, exist_ok=True)
    faulthandler.enable()
    faulty, rows = False, []
    for name in arguments.only:
        fuzz, number, longest = Fuzz(name, arguments.seed, findings), 0, 0.0
        if arguments.case is not None:
            print(fuzz.case(arguments.case))
            continue
        end = time.monotonic() + 60 * arguments.minutes
        while time.monotonic() < end:
            begin = time.process_time()
            # Should the interpreter itself hang, where no signal reaches it.
            faulthandler.dump_traceback_later(2 * guard.WAIT, exit=True)
            (findings / f"{name}-now").write_text(str(number))
            fuzz.case(number)
            number, longest = number + 1, max(longest, time.process_time() - begin)
        faulthandler.cancel_dump_traceback_later()
        fuzz.close()
        faulty |= bool(fuzz.outcomes["FAULT"])
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(fuzz.outcomes.items()))
        rows.append(f"| {name} | {number} | {kinds} | {longest:.1f} s |")
        print(rows[-1], flush=True)
    print("\n".join(["", "| reader | cases | outcomes | the longest, of CPU time |", "|---|---|---|---|", *rows]))
    print(f"findings are in {findings}" if faulty else "nothing but clear errors")
    return int(faulty)


if __name__ == "__main__":
    sys.exit(main())
