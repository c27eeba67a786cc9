"""Records of what a rank prints."""

from __future__ import annotations

from typing import Annotated, Literal

from traceml_ray.signals.kind import LINES, Kind
from traceml_ray.wire.codec import FEW, Count, Int64, Part


class Output(Part, frozen=True):
    """The newest lines that a rank process wrote to stdout or stderr, since the record before."""

    stream: Literal[1, 2]
    """File descriptor: 1 is stdout, 2 is stderr."""
    t_ns: Int64
    """Time at which they were read (ns, clock of the rank's node)."""
    lines: Annotated[list[str], FEW] = []
    unfinished: str = ""
    """Text after the last line break: a progress bar or a question."""
    skipped: Count = 0
    """Number of lines dropped before these, because too many came at once."""
    by_relay: bool = False
    """
    Whether the relay read the lines from the file that the stream is written to. Otherwise the agent saw them
    in Python.
    """

    @property
    def amount(self) -> int:
        """Number of lines."""
        return len(self.lines) + bool(self.unfinished)


OUTPUT = Kind(
    "output",
    Output,
    "lines of output",
    table="output",
    exported="output",
    node_times=("t_ns",),
    bundle="all",
    forms={"lines": LINES},
    amount=lambda output: output.amount,
)
