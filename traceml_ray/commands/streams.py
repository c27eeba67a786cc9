"""Standard streams that take whatever a command prints: of any encoding, and also where there is none."""

from __future__ import annotations

import codecs
import io
import os
import sys
from pathlib import Path

from traceml_ray.text import in_ascii

_HANDLER = "traceml_ray.in_ascii"


def set_up() -> None:
    """Write what an encoding lacks as ASCII; let what is written to a closed stream go nowhere."""
    codecs.register_error(_HANDLER, _replaced)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def _replaced(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return in_ascii(error.object[error.start : error.end]), error.end
