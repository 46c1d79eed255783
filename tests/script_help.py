"""What scripts print for --help, from a process that has imported torch once, and transformers where a script needs it:
each script runs in a fork of it."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A script sees what it would see as a program: its arguments, its directory first on the path, the caller's directory.
_SERVER = """
import json, os, runpy, sys, tempfile
import torch

def show(script, arguments, directory, output):
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(directory)
    sys.argv, sys.path[0] = [script, *arguments, "--help"], os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")

for line in sys.stdin:
    if "transformers" in open(json.loads(line)[0]).read():
        import transformers.trainer
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            show(*json.loads(line), output.fileno())
            sys.exit()
        _, status = os.waitpid(child, 0)
        output.seek(0)
        print(json.dumps([os.waitstatus_to_exitcode(status), output.read().decode()]), flush=True)
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


@functools.cache
def help_of(script: str | Path, *arguments: str, directory: str | Path = "/") -> str:
    """What ``script ARGUMENTS --help`` prints when it is called in ``directory``; it must end well."""
    server = _server()
    print(json.dumps([str(ROOT / script), arguments, str(directory)]), file=server.stdin, flush=True)
    code, output = json.loads(server.stdout.readline())
    assert code == 0, output
    return output
