"""What the actors are made from: JSON, so that nothing of ours is pickled."""

from __future__ import annotations

import msgspec

from traceml_ray.settings import Settings


class ActorConfig(msgspec.Struct, frozen=True):
    """One session's actors; paths are absolute, on the node where they run."""

    session: str
    folder: str
    """The session folder."""
    socket: str
    """Where the relay listens."""
    spool: str
    """Where agents leave what they could not deliver."""
    settings: Settings
    info: dict[str, str | int | float | None] = {}
    """What the launcher knows of the run."""

    def to_json(self) -> bytes:
        """Return this as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> ActorConfig:
        """Return what `to_json` wrote."""
        return msgspec.json.decode(data, type=cls)
