"""What megazero raises for a user's mistake: one clear message that names the field or file, and the fix.

Our own invariants use ``assert``; everything a user can cause ends here.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

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


def reason_of(error: OSError, place: str = "place") -> str:
    """What is wrong with what was to be written, and what to do. ``place``: what says where that is."""
    elsewhere = f"choose another {place}"
    return {
        errno.ENOSPC: f"no space left on the disk: free some, or {elsewhere}",
        errno.EDQUOT: f"the disk quota is used up: free some, or {elsewhere}",
        errno.EFBIG: f"File too large for the limit on files' size: raise it (ulimit -f), or {elsewhere}",
        errno.ENOTEMPTY: "something else has been put there meanwhile",
        errno.EEXIST: f"something else is there already; remove it, or {elsewhere}",
        errno.ENOTDIR: f"a file is where a directory has to be; remove it, or {elsewhere}",
        errno.EACCES: f"Permission denied: {elsewhere}",
        errno.EROFS: f"the file system is read-only: {elsewhere}",
    }.get(error.errno or 0, error.strerror or str(error))


def explained(error: OSError) -> str:
    """The same, with the file where the error knows it (that of a full disk does not)."""
    reason = reason_of(error)
    return f"{reason} ({error.filename})" if error.filename else reason


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


class CommandLine(argparse.ArgumentParser):
    """A parser of flags whose errors name the flags that may have been meant."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown)}")
        return parsed

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self._given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._given, namespace)

    def parse_beside_settings(self, args: Sequence[str] | None = None) -> tuple[Any, list[str]]:
        """The script's own flags, and the words of --section.field VALUE. Raises ConfigError for what is neither and
        much like a flag of its own; the rest is for those who know the settings."""
        parsed, rest = self.parse_known_args(args)
        if found := self._misspelt(rest, cutoff=0.85):
            raise ConfigError([(flag, f"unknown flag; did you mean {meant}?") for flag, meant in found.items()])
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        super().error(self.hinted(message))

    def hinted(self, message: str) -> str:
        """Where a flag is missing, another that was given may be a misspelling of it."""
        is_missing = message.startswith("the following arguments are required")
        return message + self._meant(self._given) if is_missing else message

    def _meant(self, words: Sequence[str]) -> str:
        return "".join(f"; for {flag}, did you mean {meant}?" for flag, meant in self._misspelt(words).items())

    def _misspelt(self, words: Sequence[str], cutoff: float = 0.6) -> dict[str, str]:
        """Unknown flag → the nearest known one, where one is near. Not of settings, which have a section."""
        known = {flag.lstrip("-"): flag for flag in _flags(self)}
        found = {}
        for word in words:
            flag = word.partition("=")[0]
            name = flag.lstrip("-")
            if flag.startswith("--") and "." not in flag and name not in known:
                found.update((flag, known[match]) for match in near(name, list(known), cutoff=cutoff))
        return found


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Those of its commands as well: argparse has the parser above them tell what they do not know."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _flags(command)
