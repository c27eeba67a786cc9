"""What a session can be asked to do, while it runs; questions, which its file answers too, are in `query`."""

from __future__ import annotations

from traceml_ray import wire
from traceml_ray.codec import Count
from traceml_ray.store.request import Request


class Dump(Request[None], frozen=True):
    """
    Make a bundle, with the stacks of all ranks; `id` will be in it. The same `id` again makes no other one,
    and is refused with the reason once that one could not be made.
    """

    id: wire.Name


class StartProfile(Request[None], frozen=True):
    """Have steps profiled, when those asked for before are; `id` will be in the profile."""

    id: wire.Name
    request: wire.ProfileRequest


class StartLayers(Request[None], frozen=True):
    """Have the layers of some steps measured; `id` will be in what is measured."""

    id: wire.Name
    request: wire.LayersRequest


class RemoveProfile(Request[bool], frozen=True):
    """Remove a profile; whether there was one of that id."""

    id: str


class Snapshot(Request[str], frozen=True):
    """Make a copy of the session file as it stands, and write the reports of the same; its name."""


class ReadFile(Request[bytes], frozen=True):
    """At most `n` bytes of a copy or of a report, from `offset` on; none beyond its end."""

    name: str
    offset: Count
    n: Count


class Discard(Request[None], frozen=True):
    """Remove a copy."""

    name: str
