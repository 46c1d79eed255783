"""`megazero launch`: workers, failures, signals. Most tests run it in this process, which has torch already."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megazero.__main__ import main
from megazero.launch.exported import exported
from tests.closed import closed_directory

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Outcome:
    """A finished launch: exit code, and what it and its workers printed."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        self.last_line = err.strip().splitlines()[-1] if err.strip() else ""


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Iterator[Callable]:
    """launch(nproc, source, *arguments): run the source as a script; the environment and handlers are put back."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    environment = dict(os.environ)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    # What remains here afterwards was left behind.
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def run(nproc: int, source: str, *arguments: str) -> Outcome:
        script = tmp_path / "my scripts" / "job.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(
            f"import os, sys, time\nsys.path.append({str(ROOT)!r})\nrank = int(os.environ['RANK'])\n{source}"
        )
        code = main(["launch", "--nproc", str(nproc), str(script), *arguments])
        captured = capfd.readouterr()
        assert list(scratch.iterdir()) == []
        return Outcome(code, captured.out, captured.err)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(environment)


def test_workers_know_who_they_are(launch: Callable, tmp_path: Path) -> None:
    source = """
import json
names = ["LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]
facts = {name: os.environ[name] for name in names}
facts.update(argv=sys.argv, path=sys.path[0], name=__name__, file=__file__)
open(f"{sys.argv[2]}/{rank}.json", "w").write(json.dumps(facts))
"""
    assert launch(3, source, "--nproc", str(tmp_path), "-x").code == 0
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    script = tmp_path / "my scripts" / "job.py"
    for rank in range(3):
        assert facts[rank]["LOCAL_RANK"] == str(rank) and facts[rank]["WORLD_SIZE"] == "3"
        assert facts[rank]["MASTER_ADDR"] == "127.0.0.1" and facts[rank]["MASTER_PORT"] == facts[0]["MASTER_PORT"]
        assert facts[rank]["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 3))
        assert facts[rank]["argv"] == [str(script), "--nproc", str(tmp_path), "-x"]
        assert facts[rank]["path"] == str(script.parent) and facts[rank]["file"] == str(script)
        assert facts[rank]["name"] == "__main__"


def test_an_exception_is_shown_once_and_siblings_are_ended(launch: Callable, tmp_path: Path) -> None:
    source = f"""
open({str(tmp_path)!r} + f"/pid{{rank}}", "w").write(str(os.getpid()))
while len([name for name in os.listdir({str(tmp_path)!r}) if name.startswith("pid")]) < 3:
    time.sleep(0.01)
if rank == 1:
    raise ValueError("boom")
time.sleep(1000)
"""
    outcome = launch(3, source)
    assert outcome.code == 1
    assert outcome.err.startswith("rank 1:\nTraceback (most recent call last):\n")
    assert outcome.err.count("Traceback") == 1 and "runpy" not in outcome.err and "worker.py" not in outcome.err
    assert outcome.last_line == "megazero launch: rank 1 failed: ValueError: boom"
    for rank in range(3):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)


def test_a_failed_process_is_not_taken_apart(tmp_path: Path) -> None:
    """What C++ does at its end may abort it, and would be in the way of the error; Python's own part is done."""
    script, written = tmp_path / "job.py", tmp_path / "written"
    script.write_text(f"""
import atexit, ctypes, sys
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.abort, None, None)
atexit.register(open({str(written)!r}, "w").write, "all of it")
sys.stdout.write("said before")
raise ValueError("boom")
""")
    done = subprocess.run([sys.executable, ROOT / "megazero/launch/worker.py", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, written.read_text()) == (1, "said before", "all of it")
    assert done.stderr.startswith("Traceback") and done.stderr.endswith("\nValueError: boom\n")


def test_a_user_error_is_one_message(launch: Callable) -> None:
    source = """
from megazero.errors import ConfigError
raise ConfigError([("parallel.tp", "3 does not divide 8"), ("train.steps", "must be at least 1")])
"""
    outcome = launch(4, source)
    assert outcome.code == 2
    lines = outcome.err.splitlines()
    assert lines[:2] == ["error: parallel.tp: 3 does not divide 8", "train.steps: must be at least 1"]
    assert len(lines) == 3 and lines[2].startswith("megazero launch: rank ")
    assert lines[2].endswith(" failed: parallel.tp: 3 does not divide 8; train.steps: must be at least 1")


def test_report_errors_inside_the_script_reports_no_second_time(launch: Callable) -> None:
    source = """
from megazero.errors import DataError
from megazero.launch.errors import report_errors

@report_errors()
def main():
    if rank == 1:
        raise DataError("corpus.bin: truncated")
    time.sleep(1000)

main()
"""
    outcome = launch(2, source)
    assert outcome.code == 2
    assert outcome.err == "error: corpus.bin: truncated\nmegazero launch: rank 1 failed: corpus.bin: truncated\n"


def test_a_killed_process_is_named(launch: Callable) -> None:
    source = """
import signal
if rank == 1:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
# What the collectives of the others say when their partner is gone; it happens first, and is not the cause.
raise RuntimeError("Connection closed by peer")
"""
    outcome = launch(2, source)
    assert outcome.code == 128 + signal.SIGKILL
    assert outcome.last_line.startswith("megazero launch: rank 1 (process ")
    assert outcome.last_line.endswith(") was killed by SIGKILL")
    assert "Traceback" not in outcome.err


def test_a_lost_connection_is_not_taken_for_the_cause(launch: Callable) -> None:
    source = """
if rank == 0:
    raise RuntimeError("Connection closed by peer")
time.sleep(0.5)
raise ValueError("the cause")
"""
    outcome = launch(2, source)
    assert outcome.last_line == "megazero launch: rank 1 failed: ValueError: the cause"
    assert "Connection closed" not in outcome.err


def test_an_exit_code_is_passed_on(launch: Callable) -> None:
    outcome = launch(2, "sys.exit(7 if rank == 1 else 0)")
    assert outcome.code == 7
    assert outcome.err == "megazero launch: rank 1 failed: exit code 7\n"
    outcome = launch(1, "os._exit(9)")
    assert outcome.code == 9
    assert outcome.last_line == "megazero launch: rank 0 failed: exit code 9"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["missing.py"], "there is no script 'missing.py' that can be read"),
        (["--nproc", "0", __file__], "--nproc 0: at least 1 process is needed"),
    ],
)
def test_a_bad_command_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["launch", *arguments]) == 2
    assert capsys.readouterr().err == f"megazero launch: {message}\n"


def test_directories_that_may_not_be_entered_hold_nothing(capsys: pytest.CaptureFixture) -> None:
    """The script's, which is one line, and the home directory, of which nothing is needed."""
    with closed_directory() as closed:
        assert main(["launch", f"{closed}/job.py"]) == 2
        assert exported({}, [], [closed, closed / "home"]) == {}
    assert capsys.readouterr().err == f"megazero launch: there is no script '{closed}/job.py' that can be read\n"


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom megazero.__main__ import main\n"
        "try:\n    main(['launch', '--help'])\nexcept SystemExit:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert "--nproc N" in done.stdout


def start(directory: Path, nproc: int, source: str) -> subprocess.Popen:
    """A launcher as a process of its own, from the command line."""
    script = directory / "job.py"
    script.write_text(source)
    command = [sys.executable, "-m", "megazero", "launch", "--nproc", str(nproc), str(script), str(directory)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)


SAVE_ON_SIGNAL = """
import os, signal, sys, time
from pathlib import Path
place, rank = Path(sys.argv[1]), os.environ["RANK"]
told = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: told.append(number))
(place / f"pid{rank}.new").write_text(str(os.getpid()))
(place / f"pid{rank}.new").rename(place / f"pid{rank}")
while not told:
    time.sleep(0.01)
time.sleep(0.3)
(place / f"saved{rank}").write_text(str(told[0]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_workers_who_may_save(tmp_path: Path, number: signal.Signals) -> None:
    launcher = start(tmp_path, 2, SAVE_ON_SIGNAL)
    wait_for(lambda: all((tmp_path / f"pid{rank}").exists() for rank in range(2)), "both workers ready")
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=180)
    assert launcher.returncode == 128 + number
    assert err == f"megazero launch: stopped by {number.name}\n"
    assert [(tmp_path / f"saved{rank}").read_text() for rank in range(2)] == [str(int(number))] * 2


def test_workers_die_with_a_killed_launcher(tmp_path: Path) -> None:
    launcher = start(tmp_path, 2, SAVE_ON_SIGNAL)
    wait_for(lambda: all((tmp_path / f"pid{rank}").exists() for rank in range(2)), "both workers ready")
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
    launcher.kill()
    launcher.communicate()

    def gone(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    wait_for(lambda: all(gone(pid) for pid in pids), "both workers dead")
    assert not any(tmp_path.glob("saved*"))


def test_two_launches_at_once(tmp_path: Path) -> None:
    """Each has its own store on the loopback, reachable by number, and there alone."""
    source = """
import os, socket, sys, time
from pathlib import Path
place, rank = Path(sys.argv[1]), os.environ["RANK"]
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
socket.create_connection(address).close()
try:  # at no other address of this machine
    socket.create_connection(("127.0.0.2", address[1]))
    os._exit(1)
except ConnectionRefusedError:
    pass
(place / f"port{rank}").write_text(str(address[1]))
while len(list(place.parent.glob("*/port*"))) < 4:
    time.sleep(0.01)
"""
    places = [tmp_path / "a", tmp_path / "b"]
    launchers = []
    for place in places:
        place.mkdir()
        launchers.append(start(place, 2, source))
    for launcher in launchers:
        out, err = launcher.communicate(timeout=180)
        assert (launcher.returncode, out, err) == (0, "", "")
    ports = [[(place / f"port{rank}").read_text() for rank in range(2)] for place in places]
    assert ports[0][0] == ports[0][1] != ports[1][0] == ports[1][1]
