"""What megazero raises for a user's mistake: one clear message that names the field or file, and the fix.

Our own invariants use ``assert``; everything a user can cause ends here.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_LONGEST_LINE, _LONGEST_NAME = 2000, 100


class MegazeroError(Exception):
    """Base of every error that is the user's to mend. The launcher prints it without a traceback."""

    def __init__(self, message: str = "") -> None:
        super().__init__("\n".join(map(_shortened, str(message).split("\n"))))


def _shortened(line: str) -> str:
    """A line of at most 2000 characters: what a message quotes may be a whole file, but its ends say what and why."""
    if len(line) <= _LONGEST_LINE:
        return line
    half = _LONGEST_LINE // 2
    return f"{line[:half]} … ({len(line) - 2 * half} characters) … {line[-half:]}"


def near(name: str, known: Sequence[str], n: int = 1, cutoff: float = 0.6) -> list[str]:
    """At most ``n`` of the known names that a user may have meant, the nearest first. None for what is far longer than
    a name, with which the search would take minutes."""
    return difflib.get_close_matches(name, known, n, cutoff) if len(name) <= _LONGEST_NAME else []


class ConfigError(MegazeroError):
    """One or several settings that cannot work, all reported together.

    ``problems`` holds (field path, what is wrong and what would fix it); a field path is what a user
    types, e.g. ``parallel.tp``.
    """

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(f"{field}: {message}" for field, message in self.problems))

    @classmethod
    def single(cls, field: str, message: str) -> ConfigError:
        return cls([(field, message)])


class WorldSizeError(ConfigError):
    """Settings that cannot work on so many processes, and may on another number of them."""


class DataError(MegazeroError):
    """A corpus, dataset, mask or tokenizer file that cannot be used as it is."""


class CheckpointError(MegazeroError):
    """A checkpoint that is missing, incomplete, damaged, or of another model."""


class ConvertError(MegazeroError):
    """Weights of another program that cannot be taken, or cannot be expressed there."""


class LaunchError(MegazeroError):
    """A job that could not be started as asked."""


class OffloadError(MegazeroError):
    """Host memory or files of offloaded state that are not to be had, or not what they were."""


class DivergenceError(MegazeroError):
    """A gradient or loss stopped being finite; the message names module, tensor and rank."""
