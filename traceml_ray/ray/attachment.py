"""How to attach to this node of the cluster, as the launcher leaves it beside the relay's socket."""

from __future__ import annotations

import msgspec

FILE = "attach.json"


class Attachment(msgspec.Struct, frozen=True):
    """What is in `attach.json`."""

    address: str
    """host:port of the cluster's head."""
    temp_dir: str = ""
    """Of this node's raylet, where it is the launcher's own."""
    environ: dict[str, str | None] = {}
    """What to have in the environment while attaching; None: what not to have."""
