"""The store where machines meet."""

from __future__ import annotations

import threading
import time

from megazero.launch.rendezvous import Meeting, listen


def test_the_machine_that_serves_the_store_leaves_last() -> None:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    meetings = [Meeting("127.0.0.1", port, node, 3, "job", listener if node == 0 else None) for node in range(3)]
    threads = [threading.Thread(target=meeting.next_rendezvous) for meeting in meetings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left: list[int] = []

    def leave(node: int) -> None:
        meetings[node].leave()
        left.append(node)

    host = threading.Thread(target=leave, args=(0,))
    host.start()
    for node in (1, 2):
        time.sleep(0.1)
        left.append(node)
        meetings[node].leave()
    host.join()
    assert left == [1, 2, 0]
