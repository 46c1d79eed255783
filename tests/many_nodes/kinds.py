"""The faults: what each does to a run, and how the run must end."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.many_nodes.namespaces import Machines, call

PATIENCE = 120.0
"""Seconds that a fault waits for the moment to strike, or for the run to notice."""


class Scene(NamedTuple):
    """A run under way. ``directory`` holds its log, and ``run``, its checkpoints; ``draw``: where the fault strikes."""

    machines: Machines
    draw: random.Random
    directory: Path
    launcher: subprocess.Popen

    def processes(self, script: str) -> list[int]:
        """Those of the job that run one of the launcher's scripts, on both machines."""
        names = self.machines.names
        return sorted(p for name in names for p, line in self.machines.processes(name).items() if script in line)

    def kill(self, script: str, number: signal.Signals = signal.SIGKILL) -> None:
        deadline = time.monotonic() + PATIENCE
        while not (found := self.processes(script)) and time.monotonic() < deadline:
            time.sleep(0.1)
        with suppress(ProcessLookupError):
            os.kill(self.draw.choice(found), number)

    def wait_for(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not what() and self.launcher.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)

    def noticed(self) -> bool:
        return "megazero launch: " in (self.directory / "log").read_text()


RANK, AGENT = "launch/worker.py", "launch/node.py"


def kill_rank(scene: Scene) -> None:
    scene.kill(RANK)


def stop_rank(scene: Scene) -> None:
    scene.kill(RANK, signal.SIGSTOP)


def kill_agent(scene: Scene) -> None:
    scene.kill(AGENT)


def kill_machine(scene: Scene) -> None:
    """The second one; its sshd comes back, as the machine would."""
    for process in scene.machines.processes(scene.machines.names[1]):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def kill_first_machine(scene: Scene) -> None:
    """With the command that started the job: nothing is left to start it again."""
    for process in scene.machines.processes(scene.machines.names[0]):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def link_down(scene: Scene) -> None:
    name = scene.draw.choice(scene.machines.names)
    scene.machines.link(name, "down")
    time.sleep(30)
    scene.machines.heal(name)


def link_slow(scene: Scene) -> None:
    name = scene.draw.choice(scene.machines.names)
    scene.machines.link(name, "tbf", "rate", "2mbit", "burst", "16kb", "latency", "400ms")
    time.sleep(15)
    scene.machines.heal(name)


def link_drops(scene: Scene) -> None:
    name = scene.draw.choice(scene.machines.names)
    scene.machines.drop(name, scene.draw.choice((5, 20, 60)))
    time.sleep(20)
    scene.machines.heal(name)


def disk_full(scene: Scene) -> None:
    ballast = scene.directory.parent / "ballast"
    with ballast.open("wb") as file, suppress(OSError):
        while True:
            os.write(file.fileno(), bytes(4096))
    scene.wait_for(scene.noticed)
    ballast.unlink()


def disk_read_only(scene: Scene) -> None:
    """On one of the machines: a mount of its own over the directory."""
    name, run = scene.draw.choice(scene.machines.names), str(scene.directory / "run")
    inside = ["nsenter", "--mount", f"--target={scene.machines.daemon(name)}"]
    scene.wait_for((scene.directory / "run").is_dir)
    call(*inside, "mount", "--bind", run, run)
    call(*inside, "mount", "-o", "remount,ro,bind", run)
    scene.wait_for(scene.noticed)
    call(*inside, "umount", "--lazy", run)


def disk_truncates(scene: Scene) -> None:
    """A rank's file is cut while it is written, and the save goes on as if it were whole."""
    found: list[Path] = []

    def there() -> bool:
        found[:] = scene.directory.glob("run/.step_*.saving/rank_*")
        return bool(found)

    before = newest(scene)
    scene.wait_for(there)
    if found:
        with suppress(OSError):
            os.truncate(scene.draw.choice(found), 1000)
    scene.wait_for(lambda: newest(scene) != before)
    scene.kill(RANK)


def newest(scene: Scene) -> Path | None:
    return max(scene.directory.glob("run/step_*[0-9]"), default=None)


def _file(scene: Scene) -> Iterator[Path]:
    """A rank's file in the newest checkpoint; then a rank is killed, so that it is read."""
    scene.wait_for(lambda: newest(scene))
    files = sorted((newest(scene) or scene.directory).glob("rank_*"))
    yield scene.draw.choice(files)
    scene.kill(RANK)


def file_flipped(scene: Scene) -> None:
    for path in _file(scene):
        with path.open("r+b") as file:
            file.seek(scene.draw.randrange(path.stat().st_size))
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1 << scene.draw.randrange(8)]))


def file_cut(scene: Scene) -> None:
    for path in _file(scene):
        os.truncate(path, scene.draw.randrange(path.stat().st_size))


def file_removed(scene: Scene) -> None:
    for path in _file(scene):
        path.unlink()


def _plant(scene: Scene, what: str) -> None:
    """job.py finds the file and does it."""
    (scene.directory / f"plant-{scene.draw.randrange(4)}").write_text(what)


def gradient_nan(scene: Scene) -> None:
    _plant(scene, "nan")


def weight_bit(scene: Scene) -> None:
    _plant(scene, f"bit {scene.draw.randrange(23)}")


def remove_newest(scene: Scene) -> None:
    """What a run whose only checkpoint is damaged asks for."""
    if path := newest(scene):
        shutil.rmtree(path)


class Kind(NamedTuple):
    """``title``: for the table. ``says``: what the last line must hold where the run must stop and not go on by itself;
    "": it must go on. ``may_say``: where it may stop, by chance, what the last line must hold then; ``remedy``: what a
    user does about it. ``small_disk``: the run's directory is on a file system of a few megabytes.
    """

    title: str
    strike: Callable[[Scene], None]
    says: str = ""
    may_say: str = ""
    remedy: Callable[[Scene], None] = lambda scene: None
    small_disk: bool = False


ONLY_ONE = "damaged|cut short|no whole checkpoint"
"""Of a run that has no checkpoint but a damaged one: to begin anew is for the user to say."""


FAULTS = {
    kind.strike.__name__: kind
    for kind in (
        Kind("SIGKILL of a rank", kill_rank),
        Kind("SIGSTOP of a rank", stop_rank),
        Kind("SIGKILL of a machine's agent", kill_agent),
        Kind("SIGKILL of all of the second machine", kill_machine),
        Kind("SIGKILL of all of the first, launcher included", kill_first_machine, says="^"),
        Kind("a link down for 30 s", link_down),
        Kind("a link of 2 Mbit/s for 15 s (tc tbf)", link_slow),
        Kind("a link that drops 5, 20 or 60 % for 20 s (nftables)", link_drops),
        Kind("disk full during saves", disk_full, says="no space left", small_disk=True),
        Kind("disk read-only on one machine", disk_read_only, says="read-only"),
        Kind("a file cut during a save", disk_truncates, may_say=ONLY_ONE, remedy=remove_newest),
        Kind("a byte of the newest checkpoint flipped", file_flipped, may_say=ONLY_ONE, remedy=remove_newest),
        Kind("a file of the newest checkpoint cut", file_cut, may_say=ONLY_ONE, remedy=remove_newest),
        Kind("a file of the newest checkpoint removed", file_removed, may_say=ONLY_ONE, remedy=remove_newest),
        Kind("NaN in a gradient of one rank", gradient_nan, says="not finite|nan"),
        Kind("a bit of one rank's weights flipped", weight_bit, says="is not that of the others|differs between ranks"),
    )
}
