"""What the actors are made from: JSON, so that nothing of ours is pickled."""

from __future__ import annotations

import msgspec

from traceml_ray.settings import Settings


class ActorConfig(msgspec.Struct, frozen=True):
    """One session's actors; paths are absolute, on the node where they run."""

    session: str
    settings: Settings
    folder: str = ""
    """The session folder, where a launcher has made it; else the aggregator makes it under `settings.out`."""
    socket: str = ""
    """Where the relay listens; "" is in `discovery.relay_folder`, which every node has for itself."""
    spool: str = ""
    """Where agents leave what they could not deliver; "" as above."""
    info: dict[str, str | int | float | None] = {}
    """What the launcher knows of the run."""
    everywhere: bool = False
    """Whether the aggregator keeps a relay on every node of the cluster, also on those that join later."""
    runtime_env: str = ""
    """Of the relays that it makes, as JSON."""
