"""What a rank prints."""

from __future__ import annotations

from typing import Annotated, Literal

from traceml_ray.signals.kind import LINES, Kind
from traceml_ray.wire.codec import FEW, Count, Int64, Part


class Output(Part, frozen=True):
    """The newest lines that a rank process wrote to stdout or stderr, since those before."""

    stream: Literal[1, 2]
    """As its file descriptor."""
    t_ns: Int64
    """When they were read, on the clock of the rank's node."""
    lines: Annotated[list[str], FEW] = []
    unfinished: str = ""
    """What stands after the last line break: a progress bar, a question."""
    skipped: Count = 0
    """Lines before these that are not kept: so many came at once."""
    by_relay: bool = False
    """Read from the file that the stream goes to; else seen by the agent, in Python."""

    @property
    def amount(self) -> int:
        """How many lines there are."""
        return len(self.lines) + bool(self.unfinished)


OUTPUT = Kind(
    "output",
    Output,
    "lines of output",
    table="output",
    exported="output",
    node_time="t_ns",
    bundle="all",
    forms={"lines": LINES},
    amount=lambda output: output.amount,
)
