"""
What the actors of a session are made from, and the sessions that this process uses.

How to attach to this node of the cluster, as the launcher leaves it beside the relay's socket.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from traceml_ray.ray.discovery import DEFAULT_SESSION
from traceml_ray.settings import Settings

_used: list[ActorConfig] = []
"""Sessions that this process has started or found and not stopped, the last one last."""


class ActorConfig(msgspec.Struct, frozen=True):
    """
    One session's actors; paths are absolute, on the node where they run. Travels as JSON: nothing of ours
    is pickled.
    """

    session: str
    settings: Settings
    folder: str = ""
    """Folder of the session's files."""
    socket: str = ""
    """Path of the relay's socket; "" is one in `discovery.relay_folder`, which every node has for itself."""
    spool: str = ""
    """Folder for what agents could not deliver; "" is one in `discovery.relay_folder`."""
    info: dict[str, str | int | float | None] = {}
    """Facts about the run that the launcher knows."""
    everywhere: bool = False
    """Whether the aggregator keeps a relay on every node of the cluster, also on those that join later."""
    runtime_env: str = ""
    """Runtime environment of the relays that the aggregator creates, as JSON."""
    launch: str = ""
    """
    Which launch of the job the relay is of, where its node has a relay of another one: "." and hex digits.
    Appended to the node's id: to the session they are two nodes, as to torchrun.
    """


class About(msgspec.Struct, frozen=True):
    """Identity of a session's aggregator. Read by any version: fields are never removed."""

    version: str
    session: str
    folder: str
    """Where the session's files are,"""
    node_id: str
    """Id of the node that `folder` is on."""
    config: msgspec.Raw
    """`ActorConfig` as JSON, as that version writes it."""
    started_at: int | None = None
    """When the session began, ns since the epoch: another one may take its name and folder later."""


def configure(settings: Settings, runtime_env: str = "") -> ActorConfig:
    """Return how the actors of a session are made that has a relay on every node; `runtime_env` as JSON."""
    name = settings.session or DEFAULT_SESSION
    out = settings.out if settings.out.startswith("~") else str(_here() / settings.out)
    settings = msgspec.structs.replace(settings, session=name, out=out)
    if settings.baseline is not None:
        from traceml_ray.reports.baseline import checked  # it imports numpy

        settings = checked(settings)
    return ActorConfig(name, settings, info={"launcher": "ray"}, everywhere=True, runtime_env=runtime_env)


def current_config() -> ActorConfig | None:
    """Return how that session is made which this process started (or found) last and has not stopped."""
    return _used[-1] if _used else None


def remember(config: ActorConfig) -> None:
    """Make a session the current one of this process."""
    forget(config.session)
    _used.append(config)


def forget(session: str) -> None:
    """Remove a stopped session from those of this process."""
    _used[:] = [config for config in _used if config.session != session]


def _here() -> Path:
    """Return what a relative folder is relative to; for a driver that is not on the cluster, a home there."""
    from ray.util.client import ray as client

    is_connected: Callable[[], bool] = client.is_connected
    return Path("~") if is_connected() else Path.cwd()


FILE = "attach.json"


class Attachment(msgspec.Struct, frozen=True):
    """Contents of `attach.json`."""

    address: str
    """host:port of the cluster's head."""
    temp_dir: str = ""
    """Folder of this node's raylet, if the launcher started it."""
    environ: dict[str, str | None] = {}
    """Environment variables to set while attaching; None: to remove."""
