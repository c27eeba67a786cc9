"""Whole texts that people read: one file per face in `tests/snapshots/`, rewritten by `make snapshots`."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

FOLDER = Path(__file__).with_name("snapshots")
WRITE = "TRACEML_TEST_SNAPSHOTS"
"""If this environment variable has any value, texts are written instead of compared."""


class Snapshot:
    """The texts of one test, in the order in which the test passes them."""

    def __init__(self, test: str) -> None:
        self._test = test
        self._given = 0
        self._write = WRITE in os.environ

    def __call__(self, face: str, *texts: str) -> None:
        """Compare texts that a person reads with the stored file of that face."""
        self._given += 1
        title = self._test if self._given == 1 else f"{self._test} ({self._given})"
        text = "\n".join(texts).strip("\n")
        file = FOLDER / f"{face}.txt"
        kept = _read(file)
        if self._write:
            _write(file, {**kept, title: text})
        elif kept.get(title) != text:
            lines = difflib.unified_diff(
                kept.get(title, "").splitlines(), text.splitlines(), str(file), title, lineterm=""
            )
            raise AssertionError(
                "\n".join([*lines, "If this change is intended, run `make snapshots` and read its diff."])
            )


def _read(file: Path) -> dict[str, str]:
    if not file.exists():
        return {}
    parts = re.split(r"^=== (.+)\n", file.read_text("utf-8"), flags=re.MULTILINE)[1:]
    return {title: text.strip("\n") for title, text in zip(parts[::2], parts[1::2], strict=True)}


def _write(file: Path, texts: dict[str, str]) -> None:
    file.parent.mkdir(exist_ok=True)
    parts = [f"=== {title}\n{text}\n" for title, text in sorted(texts.items())]
    file.write_text("\n".join(parts), "utf-8")
