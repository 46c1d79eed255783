"""What is started on each machine of a job of several: its part, as the first line of its standard input says.

Run by path. The line is JSON (`cluster.Order`), so that nothing has to be quoted for two shells and no variable is seen
in a list of processes. What follows on standard input are signals for the workers, a number a line; its end means that
whoever started the job is gone, and ends the part too. The verdict is the last line on standard error.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import sys
import tempfile
import threading

VERDICT = "\x1e megazero verdict "
"""Begins the last line."""


def main() -> None:
    """Take the order, run the part, give the verdict."""
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    order = json.loads(sys.stdin.readline())
    try:
        os.chdir(order["directory"])
    except OSError as error:
        _give([2, f"{socket.gethostname()}: {order['directory']}: {error.strerror}", 0, False])
    os.environ.update(order["environment"])
    threading.Thread(target=_obey, daemon=True).start()
    from megazero.errors import LaunchError
    from megazero.launch.agent import Part, run_part
    from megazero.launch.verdict import Cause, Verdict

    part = Part(**order["part"])
    try:
        if name := interface_to(part.address, part.port or 9):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        with tempfile.TemporaryDirectory(prefix="megazero-launch-", ignore_cleanup_errors=True) as directory:
            verdict = run_part(part, order["command"], directory)
    except LaunchError as error:
        verdict = Verdict(2, f"{socket.gethostname()}: {error}", Cause.SAID)
    except Exception as error:  # of the agent's own: a store out of reach, say
        verdict = Verdict(1, f"{socket.gethostname()}: {type(error).__name__}: {error}", Cause.LOST)
    _give(list(verdict))


def _obey() -> None:
    """Pass signals on to this process, whose agent passes them on to the workers."""
    for line in sys.stdin:
        os.kill(os.getpid(), int(line))
    os.kill(os.getpid(), signal.SIGTERM)


def _give(verdict: list) -> None:
    sys.stdout.flush()
    print(VERDICT + json.dumps(verdict), file=sys.stderr, flush=True)
    os._exit(verdict[0])


def interface_to(address: str, port: int) -> str | None:
    """The name of the interface by which this machine reaches another, or has the address itself; None if unknown.

    gloo would look this machine's own name up, which often gives an address of the loopback that no other can reach.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, socket.AF_INET, socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                get_address = 0x8915  # SIOCGIFADDR
                try:
                    reply = fcntl.ioctl(probe, get_address, struct.pack("256s", name.encode()[:15]))
                except OSError:
                    continue
                if socket.inet_ntoa(reply[20:24]) == own:
                    return name
    except OSError:
        return None
    return None


if __name__ == "__main__":
    main()
