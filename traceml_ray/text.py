"""The only formatter: numbers, units, shares, bytes, durations and lists of ranks as people read them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence

NA = "n/a"
MOMENT = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:\+00:00|Z))")
"""Pattern of a moment (ISO 8601) in a sentence."""
_LISTED = 8
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ASCII = str.maketrans("│─├┤┌┐└┘…·×÷≈−–—←→▲△◆●✓○█▓▒░▚↑↓°", "|-++++++.:x/~---<>^?!o*o#%+=&^v ")


def number(
    value: float | None,
    digits: int | None = None,
    *,
    figures: int = 3,
    sign: bool = False,
    aligned: bool = False,
) -> str:
    """
    Return `value` with so many significant `figures` ("1,204", "41.3", "0.25", "4"), two decimals at most, or
    with so many `digits` after the point; "n/a" where it is not known. `aligned` keeps zeros at the end, for
    a column of numbers; `sign` writes a plus.
    """
    if value is None or value != value:
        return NA
    if digits is None:
        decimals = figures - 1 - math.floor(math.log10(abs(value))) if value else figures - 1
        text = f"{value:{'+' if sign else ''},.{min(max(decimals, 0), 2)}f}"
        text = text.rstrip("0").rstrip(".") if "." in text and not aligned else text
    else:
        text = f"{value:{'+' if sign else ''},.{digits}f}"
    if not text.strip("+-0."):  # what is rounded to nothing has no sign
        text = text.lstrip("+-")
    return text.replace("-", "−")


def unit(value: float | None, name: str, digits: int | None = None) -> str:
    """Return "41.3 W"."""
    return NA if value is None else f"{number(value, digits)} {name}"


def ms(value: float | None) -> str:
    """Return milliseconds as "41.3 ms"."""
    return unit(value, "ms")


def ns(value: float) -> str:
    """Return nanoseconds as "41.3 ms"."""
    return ms(value / 1e6)


def percent(value: float | None, *, sign: bool = False) -> str:
    """Return per cent as "28 %", "6.1 %", with `sign` as "+28 %"."""
    return NA if value is None else f"{number(value, figures=2, sign=sign)} %"


def times(value: float | None) -> str:
    """Return a ratio: "1.62×"."""
    return NA if value is None or value != value else f"{value:.2f}×"


def share(value: float | None) -> str:
    """Return a share, 0..1, as "28 %"."""
    return NA if value is None else percent(100 * value)


def size(value: float | None, per: str = "") -> str:
    """Return bytes as "3.2 GB"; `per` is "/s" for a rate."""
    if value is None:
        return NA
    for name in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or name == "TB":
            break
        value /= 1000
    return f"{number(value, 0 if name == 'B' else None)} {name}{per}"


def flops(value: float | None) -> str:
    """Return a number of floating-point operations as "3.2 TFLOPs"."""
    if value is None:
        return NA
    for name in ("", "k", "M", "G", "T", "P", "E"):
        if abs(value) < 999.5 or name == "E":
            break
        value /= 1000
    return f"{number(value)} {name}FLOPs"


def duration(seconds: float | None) -> str:
    """Return seconds as "0.4 s", "41 s", "16 min", "3.2 h" or "4 d"."""
    if seconds is None:
        return NA
    for name, least, factor in (("s", 120, 60), ("min", 120, 60), ("h", 48, 24)):
        if seconds < least:
            return f"{number(seconds, figures=2)} {name}"
        seconds /= factor
    return f"{number(seconds, figures=2)} d"


def age(seconds: float | None) -> str:
    """Return how old something is, to the second: "0 s", "41 s", "16 min"."""
    return NA if seconds is None else duration(round(seconds))


def clock(moment: str | None) -> str:
    """Return a moment (ISO 8601, UTC) as "22:13:25"."""
    return NA if moment is None else moment[11:19]


def with_clocks(sentence: str) -> str:
    """Return a sentence with its moments as "22:13:25 UTC"."""
    return MOMENT.sub(lambda match: f"{clock(match[0])} UTC", sentence)


def date(moment: str | None) -> str:
    """Return a moment (ISO 8601, UTC) as "2023-11-14 22:13:25"."""
    return NA if moment is None else moment[:19].replace("T", " ")


def with_dates(sentence: str) -> str:
    """Return a sentence with its moments (ISO 8601, UTC) as "2023-11-14 22:13:25 UTC"."""
    return MOMENT.sub(lambda match: f"{date(match[0])} UTC", sentence)


def count(amount: int, noun: str) -> str:
    """Return "1 rank", "1,024 ranks"."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def plain(value: object) -> str:
    """Return a word or an integer as it is, None and "" as "n/a"."""
    return NA if value in (None, "") else f"{value:,}" if isinstance(value, int) else str(value)


def words(name: str) -> str:
    """Return an identifier as words: "co_critical" → "co critical"."""
    return name.replace("_", " ")


def listed(items: Sequence[str], more: int = 0) -> str:
    """Return "a", "a and b", "a, b and c"; of more than eight items, or `more`, how many others there are."""
    more += max(len(items) - _LISTED, 0)
    items = [*items[:_LISTED], *[f"{more:,} more"] * (more > 0)]
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def ranks(numbers: Iterable[int], total: int = 0) -> str:
    """Return "rank 5", "ranks 0, 4-7 and 9"; "" for none. Of `total` ranks, `numbers` may be only some."""
    runs = [part for run in _runs(numbers) for part in ([run[:1], run[1:]] if len(run) == 2 else [run])]
    total = max(total, sum(map(len, runs)))
    more = total - sum(map(len, runs[:_LISTED]))
    return f"rank{'s' * (total > 1)} {listed([*map(_run, runs[:_LISTED])], more)}" if total else ""


def ranges(numbers: Iterable[int]) -> str:
    """Return "0-1, 4-7, 9", as a table has it."""
    return ", ".join(map(_run, _runs(numbers)))


def _runs(numbers: Iterable[int]) -> list[range]:
    """Return numbers in order, as runs without a gap."""
    runs: list[range] = []
    for value in sorted(set(numbers)):
        if runs and value == runs[-1].stop:
            runs[-1] = range(runs[-1].start, value + 1)
        else:
            runs.append(range(value, value + 1))
    return runs


def _run(run: range) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def one_line(text: object) -> str:
    r"""
    Return `text` with what a terminal cannot show (line breaks, escapes, half characters, what turns the
    direction of text) written out as JSON does it, such as `\n` and `\u001b`.
    """
    line = str(text)
    return line if line.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in line)


def visible(text: str) -> str:
    """Return text of several lines, each as `one_line` has it."""
    return "\n".join(map(one_line, text.split("\n")))


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    parts = (units[index : index + 2].hex() for index in range(0, len(units), 2))
    return _SHORT.get(char) or "".join(f"\\u{part}" for part in parts)


def in_ascii(text: str) -> str:
    """Return `text` for a terminal or a file that has nothing but ASCII, as long as it is."""
    return text.translate(_ASCII).encode("ascii", "replace").decode()


@functools.lru_cache(4096)
def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return what sorts names as people do: node-2 before node-10."""
    return tuple(
        (0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)
    )
