"""Escape sequences of a terminal. Imports nothing that draws: a launcher uses it."""

from __future__ import annotations

SAVE, RESTORE = "\x1b7", "\x1b8"
"""Save and restore the cursor's position and colours."""
LEAVE = f"{SAVE}\x1b[r{RESTORE}\x1b[m\x1b[J"
"""After a panel beneath: all lines scroll again, and what is below the cursor is empty."""
