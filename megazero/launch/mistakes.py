"""What transformers and accelerate find wrong with a ds_config, before the engine sees it: the user's to mend as well.

Nothing here imports them: it runs where a process fails, whatever it is.
"""

from __future__ import annotations

import json
import traceback
from types import FrameType

_READER = "accelerate/utils/deepspeed.py"
_PLACES = (
    _READER,
    "accelerate/accelerator.py",
    "accelerate/utils/dataclasses.py",
    "transformers/integrations/deepspeed.py",
)
"""Where they read the config, compare it with their own settings and fill in "auto"."""


def about_a_config(error: BaseException) -> str | None:
    """The message, where it says all there is to know, and the way to it through those libraries nothing; else None."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, json.JSONDecodeError):
        read = [frame.f_locals.get("config_file_or_dict") for frame in frames if _is_in(frame, (_READER,))]
        return f"{read[0]}: line {error.lineno}, column {error.colno}: {error.msg}" if read else None
    return str(error) if isinstance(error, ValueError) and frames and _is_in(frames[-1], _PLACES) else None


def _is_in(frame: FrameType, places: tuple[str, ...]) -> bool:
    return frame.f_code.co_filename.replace("\\", "/").endswith(places)
