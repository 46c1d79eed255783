"""Text from tokens as they come: only whole characters, and nothing of what a stop string cuts off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What every decoder puts where bytes are no character (yet)."""


class TextStream:
    """The continuation of one prompt. What ``push`` and, at the end, ``finish`` return is the text in order.

    A character that spans several tokens is held back until it is whole, and text that may be the beginning of a
    stop string until it is not. A stop string ends the text before its first letter: ``stopped``.

    [Note: decoding in a window]
    A token's text may depend on its neighbours: a first space that vanishes, bytes that make one character together.
    So tokens are decoded together with those before them, and what is new is what goes beyond the text already taken.
    Whenever the text ends in a whole character the window moves up, to keep the cost per token constant; the tokens
    that gave the last text stay in it as the neighbours of the next.

    ``decode``: token ids → text; ``prompt``: the prompt's ids, the first tokens' neighbours.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._decode, self._stop = decode, tuple(stop)
        self._window = list(prompt)
        self._neighbours = len(self._window)  # tokens of the window whose text is taken
        self._taken = len(decode(self._window))  # characters of the window's text
        self._held = ""

    def push(self, token: int) -> str:
        """What can be shown once this token is there; nothing more after a stop string."""
        self._window.append(token)
        text = self._decode(self._window)
        whole = text.rstrip(UNFINISHED)
        new, self._taken = whole[self._taken :], max(self._taken, len(whole))
        if new and whole == text:
            self._window = self._window[self._neighbours :]
            self._neighbours, self._taken = len(self._window), len(self._decode(self._window))
        return self._release(new)

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        rest = self._release(self._decode(self._window)[self._taken :])
        rest, self._held = rest + self._held, ""
        return rest

    def _release(self, new: str) -> str:
        if self.stopped:
            return ""
        text, self._held = self._held + new, ""
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``, but not all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
