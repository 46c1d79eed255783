"""Scripts from a process that has imported torch once, and transformers where a script's help needs it: each runs in a
fork of it. What the script starts in turn, the ranks of a launch say, are processes as ever."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A script sees what it would see as a program: its arguments and variables, its directory (or the caller's, for -m)
# and PYTHONPATH first on the path, the caller's directory.
_SERVER = """
import json, os, runpy, sys, tempfile
import torch

def run(words, directory, environment, descriptors):
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    module = words[0] == "-m"
    sys.argv = words[1:] if module else words
    first = directory if module else os.path.dirname(words[0])
    sys.path[:1] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    if module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")

for line in sys.stdin:
    words, directory, environment, given = json.loads(line)
    if "--help" in words and "transformers" in open(words[0]).read():
        import transformers.trainer
    with tempfile.TemporaryFile() as before, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        before.write(given.encode())
        before.seek(0)
        child = os.fork()
        if not child:
            run(words, directory, environment, [file.fileno() for file in (before, out, err)])
            sys.exit()
        _, status = os.waitpid(child, 0)
        for file in (out, err):
            file.seek(0)
        print(json.dumps([os.waitstatus_to_exitcode(status), *(f.read().decode() for f in (out, err))]), flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", _SERVER], stdin=pipe, stdout=pipe, text=True, cwd="/")


def shutdown() -> None:
    """End the process, if there is one."""
    if _server.cache_info().currsize:
        _server().communicate()
        _server.cache_clear()


def run_forked(
    *words: str | Path, directory: str | Path, environment: Mapping[str, str] = os.environ, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """``python WORDS…``, a script by its whole path or -m and a module, in ``directory`` with ``text`` to read."""
    server, command = _server(), [*map(str, words)]
    print(json.dumps([command, str(directory), dict(environment), text]), file=server.stdin, flush=True)
    return subprocess.CompletedProcess(command, *json.loads(server.stdout.readline()))


@functools.cache
def help_of(script: str | Path, *arguments: str, directory: str | Path = "/") -> str:
    """What ``script ARGUMENTS --help`` prints when it is called in ``directory``; it must end well."""
    done = run_forked(ROOT / script, *arguments, "--help", directory=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
