"""What megazero raises for a user's mistake: one clear message that names the field or file, and the fix.

Our own invariants use ``assert``; everything a user can cause ends here.
"""

from __future__ import annotations

from collections.abc import Sequence


class MegazeroError(Exception):
    """Base of every error that is the user's to mend. The launcher prints it without a traceback."""


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
