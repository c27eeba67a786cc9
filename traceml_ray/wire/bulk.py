"""
What travels of a trace: calls from a relay to the aggregator, of their own, beside the packets with rows.

A rank leaves its trace in a file and says in which folder (`wire.Capture`); the relay, on the same host,
reads it from there. Each reply says how much the aggregator has, so that both may be restarted meanwhile.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from traceml_ray.wire.codec import Count, Message, Name, WireError

TRACE_NAME = "trace.json.gz"
"""Name of a trace's file in the folder that the rank has made for it."""
FOLDER_PREFIX = "trace-"
"""How the name of that folder begins; the id of the rank process follows."""
PART_BYTES = 60 * 1024
"""Largest size of `TracePart.data`, so that the whole message stays below `messages.MAX_BATCH_BYTES`."""


class TracePart(Message, tag="trace", frozen=True):
    """
    Relay to aggregator: a part of the trace of a rank. Without `data` it asks how much of it is there. The
    reply is TraceReply.
    """

    process_id: Name
    profile: Name
    """Id of the profile."""
    number: Count
    """Number of the command, as in `Capture`."""
    total_bytes: Count
    offset: Count
    data: bytes = b""
    failure: Annotated[str, msgspec.Meta(max_length=300)] = ""
    """Why the relay cannot read the rest: it will not come."""

    def check(self) -> None:
        """Raise `WireError` where the part does not lie in its trace, or is too large."""
        if len(self.data) > PART_BYTES:
            raise WireError("too_large", f"{len(self.data)} bytes, limit {PART_BYTES}")
        if self.offset + len(self.data) > self.total_bytes:
            raise WireError("bad_columns", f"{len(self.data)} bytes at {self.offset} of {self.total_bytes}")


class TraceReply(Message, tag="trace_reply", frozen=True):
    """Aggregator to relay."""

    offset: Count | None = None
    """Where to go on: the number of bytes that are there, or are about to be. None: no more is wanted."""
    pause_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    """How long to wait before the next call, in seconds."""
