"""pretrain/gpt.py under `megazero launch`: processes that die, signals, rough surroundings. Case 45, P2 and P6."""

from __future__ import annotations

import contextlib
import io
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megazero.checkpoint import manifest, newest
from tests.engine.tiny import ROOT, SCRIPT, flags, rank_files, run_script, series, steps_in, tiny
from tests.pretrain.test_bad_input import flip, listing

NUMBERS = ("loss", "grad_norm", "lr", "consumed_samples")
CONSTANT = {"optimizer.schedule": "constant"}

MISHAP = """
import os, runpy, signal, sys
sys.path.insert(0, {root!r})
from megazero.engine import Engine
train_batch = Engine.train_batch

def train_batch_with_a_mishap(engine, source):
    if engine.step == 6 and engine.topology.rank == 1:
        {mishap}
    return train_batch(engine, source)

Engine.train_batch = train_batch_with_a_mishap
runpy.run_path({script!r}, run_name="__main__")
"""


def launch(
    place: Path, nproc: int, settings: dict, script: Path = SCRIPT, prefix: Sequence[str] = ()
) -> subprocess.Popen:
    """`megazero launch` in the directory ``place``."""
    code = f"import sys; sys.path[0] = {str(ROOT)!r}; from megazero.__main__ import main; sys.exit(main())"
    command = [*prefix, sys.executable, "-c", code, "launch", "--nproc", str(nproc), str(script), *flags(settings)]
    return subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_killed_rank_ends_the_job_which_then_resumes_exactly(corpus: Path, tmp_path: Path, ranks: Callable) -> None:
    script = tmp_path / "mishap.py"
    script.write_text(MISHAP.format(root=str(ROOT), script=str(SCRIPT), mishap="os.kill(os.getpid(), signal.SIGKILL)"))
    changes = {"parallel.pp": 2, "checkpoint.save_interval": 4, "model.dropout": 0.1}
    settings = tiny(corpus, changes | {"checkpoint.dir": tmp_path / "run", "log.jsonl": tmp_path / "run.jsonl"})
    launcher = launch(tmp_path, 2, settings, script)
    _, err = launcher.communicate(timeout=300)
    assert launcher.returncode == 128 + signal.SIGKILL, err
    assert err.splitlines()[-1].startswith("megazero launch: rank 1 (process ") and "was killed by SIGKILL" in err
    assert "Traceback" not in err
    assert steps_in(tmp_path / "run") == [4] and lines_of(tmp_path / "run.jsonl") == 6

    ranks(2, run_script, settings)
    whole = tiny(corpus, changes | {"checkpoint.dir": tmp_path / "whole", "log.jsonl": tmp_path / "whole.jsonl"})
    ranks(2, run_script, whole)
    assert series(tmp_path / "run.jsonl", *NUMBERS) == series(tmp_path / "whole.jsonl", *NUMBERS)
    assert rank_files(tmp_path / "run") == rank_files(tmp_path / "whole")


def test_an_exception_in_a_batch_is_shown_once(corpus: Path, tmp_path: Path) -> None:
    script = tmp_path / "mishap.py"
    script.write_text(MISHAP.format(root=str(ROOT), script=str(SCRIPT), mishap="raise ValueError('the cause')"))
    launcher = launch(tmp_path, 2, tiny(corpus, {"zero.stage": 1}), script)
    _, err = launcher.communicate(timeout=300)
    assert launcher.returncode == 1
    assert err.count("Traceback") == 1 and err.startswith("rank 1:\nTraceback")
    assert "in train_batch_with_a_mishap" in err
    assert err.splitlines()[-1] == "megazero launch: rank 1 failed: ValueError: the cause"


def without_a_name() -> list[str]:
    """A command's beginning that has it run on a machine whose own name nobody knows, where the kernel allows it."""
    command = ["unshare", "--uts", "sh", "-c", 'hostname nonesuch.invalid && exec "$@"', "sh"]
    allowed = shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0
    return command if allowed else []


@pytest.mark.whole
def test_two_runs_at_once_one_of_them_stopped_by_sigterm(corpus: Path, tmp_path: Path, ranks: Callable) -> None:
    """The one to be stopped runs in a path with spaces, on a machine without a name. It saves, and resumes exactly."""
    places = [tmp_path / "a b" / "c d", tmp_path / "other"]
    for place in places:
        place.mkdir(parents=True)
    changes = {**CONSTANT, "checkpoint.dir": "my run", "log.jsonl": "my metrics.jsonl"}
    launchers = [
        launch(places[0], 2, tiny(corpus, {**changes, "train.steps": 1_000_000}), prefix=without_a_name()),
        launch(places[1], 2, tiny(corpus, {**changes, "train.steps": 3, "parallel.tp": 2})),
    ]
    deadline = time.monotonic() + 300
    while lines_of(places[0] / "my metrics.jsonl") < 3:
        assert launchers[0].poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    launchers[0].send_signal(signal.SIGTERM)
    out, err = launchers[0].communicate(timeout=300)
    assert launchers[0].returncode == 128 + signal.SIGTERM
    assert err == "megazero launch: stopped by SIGTERM\n"
    (stopped,) = steps_in(places[0] / "my run")
    assert f"stopping after step {stopped}: received SIGTERM" in out and f"saved step {stopped} in my run" in out
    assert lines_of(places[0] / "my metrics.jsonl") == stopped

    settings = {**CONSTANT, "train.steps": stopped + 2}
    for name in ("a b/c d", "whole"):
        here = {"checkpoint.dir": tmp_path / name / "my run", "log.jsonl": tmp_path / name / "my metrics.jsonl"}
        ranks(2, run_script, tiny(corpus, settings | here))
    resumed, whole = (series(tmp_path / name / "my metrics.jsonl", *NUMBERS) for name in ("a b/c d", "whole"))
    assert resumed == whole and len(whole) == stopped + 2
    assert rank_files(places[0] / "my run") == rank_files(tmp_path / "whole" / "my run")

    _, err = launchers[1].communicate(timeout=300)
    assert (launchers[1].returncode, err) == (0, "")
    assert steps_in(places[1] / "my run") == [3]


def test_a_time_limit_ends_a_run_well(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    places = {"checkpoint.dir": tmp_path / "run", "log.jsonl": tmp_path / "run.jsonl"}
    settings = tiny(corpus, {**CONSTANT, **places, "train.steps": 1_000_000, "train.time_limit": 0.005})
    run_script(settings)
    (stopped,) = steps_in(tmp_path / "run")
    assert f"stopping after step {stopped}: train.time_limit of 0.005 minutes is over" in capsys.readouterr().out
    longer = {**CONSTANT, "train.steps": stopped + 1}
    whole = {"checkpoint.dir": tmp_path / "whole", "log.jsonl": tmp_path / "whole.jsonl"}
    run_script(tiny(corpus, longer | places), tiny(corpus, longer | whole))
    assert series(tmp_path / "run.jsonl", *NUMBERS) == series(tmp_path / "whole.jsonl", *NUMBERS)
    assert rank_files(tmp_path / "run") == rank_files(tmp_path / "whole")


@pytest.mark.parametrize("steps", [3, 2])
def test_a_finished_run_is_not_done_again(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture, steps: int
) -> None:
    places = {"checkpoint.dir": tmp_path / "run", "log.jsonl": tmp_path / "run.jsonl"}
    run_script(tiny(corpus, {**places, "train.steps": 3}))
    before = listing(tmp_path / "run"), (tmp_path / "run.jsonl").read_text()
    capsys.readouterr()
    run_script(tiny(corpus, {**places, "train.steps": steps}))
    assert f"all of train.steps = {steps} are done" in capsys.readouterr().out
    assert (listing(tmp_path / "run"), (tmp_path / "run.jsonl").read_text()) == before


def damage(place: Path) -> None:
    """Flip a bit in the weight of a layer that is the last stage's."""
    directory = newest(place / "run")
    (file,) = manifest.read(directory).files
    (chunk,) = [c for c in file.chunks if (c.kind, c.name) == ("weight", "layers.2.mlp.down.weight")]
    flip(directory / file.name, chunk.start)


def test_bad_input_under_the_launcher(place: Path, tmp_path: Path) -> None:
    """One rank's share of a checkpoint is damaged: told once, repeated by the launcher, nothing written."""
    here = tmp_path / "here"
    shutil.copytree(place, here)
    damage(here)
    before = listing(tmp_path)
    launcher = launch(tmp_path, 2, tiny(here, {"checkpoint.dir": here / "run", "parallel.pp": 2}))
    out, err = launcher.communicate(timeout=300)
    assert (launcher.returncode, out) == (2, "")
    assert len(err.splitlines()) == 2, err
    first, last = err.splitlines()
    words = "rank_00000.safetensors: damaged: the checksum of weight of layers.2.mlp.down.weight does not match"
    assert first.startswith("error: ") and words in first and words in last
    assert last.startswith("megazero launch: rank ") and listing(tmp_path) == before


def failures(runs: dict[str, dict]) -> dict[str, tuple[int, str]]:
    """Exit code and standard error of each run on this rank."""
    found = {}
    for name, settings in runs.items():
        with contextlib.redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit) as ending:
            run_script(settings)
        found[name] = ending.value.code, err.getvalue()
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_bad_input_on_real_ranks(place: Path, tmp_path: Path, ranks: Callable, world_size: int) -> None:
    """Every rank ends, in step with the others and with the same message, also where only one has a reason to."""
    here = tmp_path / "here"
    shutil.copytree(place, here)
    damage(here)
    run, parallel = {"checkpoint.dir": here / "run"}, {"parallel.pp": 2, "zero.stage": world_size // 4}
    runs = {
        "damaged: the checksum of weight of layers.2.mlp.down.weight": {**run, **parallel},
        "is of another model": {**run, **parallel, "model.num_layers": 4},
        "holds step 1 of another run": {**run, **parallel, "checkpoint.resume": "never"},
        "has a vocabulary of 257 entries": {**parallel, "model.vocab_size": 256},
        "log.jsonl: cannot write": {**parallel, "log.jsonl": here / "train.bin" / "metrics.jsonl"},
        "train.global_batch_size: 8 is not a multiple": {**parallel, "train.micro_batch_size": 3},
    }
    before = listing(tmp_path)
    for found in ranks(world_size, failures, {words: tiny(here, changes) for words, changes in runs.items()}):
        for words, (code, err) in found.items():
            assert code == 2 and "Traceback" not in err
            # Where no launcher watches over them, ranks other than the first keep what is plain to all to themselves.
            assert err.count("error: ") <= 1 and (not err or words in err)
    assert listing(tmp_path) == before


def test_the_script_fits_on_a_screen() -> None:
    assert len(SCRIPT.read_text().splitlines()) < 60
