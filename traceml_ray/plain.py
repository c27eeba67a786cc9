"""Text of others as something that a terminal can show."""

from __future__ import annotations


def one_line(text: object) -> str:
    """Return `text` with what is not printable (line breaks, escapes, half characters) written out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))
