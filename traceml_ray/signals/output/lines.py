"""The last lines of a rank process, made of what its agent and its relay have read."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from traceml_ray.signals.output.records import Output

_STREAMS = {1: "stdout", 2: "stderr"}


class OutputLine(msgspec.Struct, frozen=True):
    """A line that a rank printed."""

    stream: str
    """stdout or stderr."""
    t_ns: int
    """When the line was read, half a second after it was printed at most: ns on the aggregator's clock."""
    text: str
    """The line without control sequences of terminals; what looks like a secret is `***`."""
    unfinished: bool
    """Whether the line has no end yet, like a progress bar or a prompt."""
    skipped: int
    """Lines before it that were not kept: so many came at once."""


class LastOutput(msgspec.Struct, frozen=True):
    """What a rank printed last."""

    rank: int
    lines: list[OutputLine]
    """In order of time."""
    missing: str | None
    """Why there are none, or none of a stream, where that is known."""


def last_lines(outputs: Iterable[Output], most: int) -> list[OutputLine]:
    """
    Return the last lines of a rank process, `most` of each of its streams, in order of time; `outputs` are
    in order of arrival.
    """
    streams: dict[tuple[int, bool], list[OutputLine]] = {}
    for output in outputs:
        lines = streams.setdefault((output.stream, output.by_relay), [])
        if lines and lines[-1].unfinished:
            lines.pop()
        name = _STREAMS[output.stream]
        lines += [
            OutputLine(name, output.t_ns, text, False, 0 if number else output.skipped)
            for number, text in enumerate(output.lines)
        ]
        lines += [OutputLine(name, output.t_ns, output.unfinished, True, 0)] if output.unfinished else []
    every = list[OutputLine]()
    for stream in _STREAMS:
        lines = joined(streams.get((stream, True), []), streams.get((stream, False), []))
        every += lines[-most:] if most else []
    return sorted(every, key=lambda line: line.t_ns)


def joined(in_file: list[OutputLine], seen: list[OutputLine]) -> list[OutputLine]:
    """
    Return the lines of one stream, from those that the relay found `in_file` and those that the agent has
    `seen` in Python. The file has what C wrote as well, but not what was still in the stream's buffer.
    """
    if not in_file or not seen:
        return in_file or seen
    if in_file[-1].unfinished and seen[-1].unfinished:
        seen = seen[:-1]
    known = {line.text for line in in_file}
    last = max((index for index, line in enumerate(seen) if line.text in known), default=None)
    if last is None:
        return sorted([*in_file, *seen], key=lambda line: line.t_ns)
    return in_file + seen[last + 1 :]
