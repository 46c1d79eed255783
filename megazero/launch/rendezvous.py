"""Where the processes of a job meet: a store that one machine serves at one address, and nowhere else.

torch's own rendezvous listens on every interface of the machine. Who reaches the store can end the job or worse, so a
job of one machine must listen on the loopback alone.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from megazero.errors import LaunchError

BACKEND = "megazero"
_PATIENCE = timedelta(minutes=5)
"""For the other machines to come."""
_FAREWELL = timedelta(seconds=10)
"""For the other machines to be done with the store."""


class Meeting(RendezvousHandler):
    """Of ``nodes`` machines, this being number ``node``, at an address of number 0. They meet once.

    ``listener``: on number 0 a socket that is bound there.
    """

    def __init__(
        self, address: str, port: int, node: int, nodes: int, run_id: str, listener: socket.socket | None
    ) -> None:
        self._address, self._port, self._node, self._nodes, self._run_id = address, port, node, nodes, run_id
        self._listener, self._store = listener, None

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            is_host = self._listener is not None
            descriptor = {"master_listen_fd": self._listener.detach()} if self._listener is not None else {}
            self._store = dist.TCPStore(
                self._address, self._port, self._nodes, is_host, _PATIENCE, multi_tenant=True, **descriptor
            )
        store = dist.PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, self._node, self._nodes, RendezvousStoreInfo(self._address, self._port))

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True

    def leave(self) -> None:
        """Called on every machine after a success. The store ends with machine 0's process, so that one goes last."""
        if self._store is None or self._nodes == 1:
            return
        store = dist.PrefixStore(f"{self._run_id}/left", self._store)
        if self._node != 0:
            with suppress(dist.DistError):
                store.set(str(self._node), "")
            return
        with suppress(dist.DistError):  # one that died since has its own verdict
            store.wait([str(node) for node in range(1, self._nodes)], _FAREWELL)


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens at this address of this machine; port 0: any free one. LaunchError where it cannot."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(4096)
    except OSError as error:
        raise LaunchError(
            f"cannot listen at {address}:{port}: {error.strerror or error}; --master_addr is to be an address of the "
            f"first machine, and --master_port one that is free there"
        ) from None
    return listener


def own_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store | None:
    """The store of a job of one machine whose processes srun or mpirun has started: at its loopback alone, where
    MASTER_ADDR says so. None where torch is to make it: of several machines, or by torchrun's agent."""
    address = os.environ.get("MASTER_ADDR", "")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or address not in ("127.0.0.1", "localhost"):
        return None
    port = int(os.environ["MASTER_PORT"])
    descriptor = {"master_listen_fd": listen("127.0.0.1", port).detach()} if rank == 0 else {}
    return dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timeout, **descriptor)


def register() -> None:
    """Make it known to torch's launcher; doing so twice is no harm."""
    rendezvous_handler_registry.register(BACKEND, _create)


def _create(parameters: RendezvousParameters) -> Meeting:
    return parameters.config["meeting"]
