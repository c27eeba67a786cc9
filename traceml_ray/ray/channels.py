"""Chooses how a rank reaches the relay of its node."""

from __future__ import annotations

from traceml_ray.agent.channel import Channel, SocketChannel
from traceml_ray.settings import RelayPaths, Settings


def channel_to_relay(settings: Settings, paths: RelayPaths) -> Channel | None:
    """Return the channel to the relay: its socket, or calls of its actor; None if there is no relay."""
    if paths.socket is None:
        return None
    if settings.channel == "actor" and settings.session is not None:
        from traceml_ray.ray.attached import AttachedChannel  # Ray is imported only where it is used

        return AttachedChannel(paths.socket, settings.session)
    return SocketChannel(paths.socket)
