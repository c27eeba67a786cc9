"""What a session can be asked about files beside its own, bundles and profiles; the rest is in `query`."""

from __future__ import annotations

from traceml_ray.codec import Count
from traceml_ray.store import profiles, results
from traceml_ray.store.request import Request


class Bundles(Request[list[results.BundleInfo]], frozen=True):
    """What was kept of incidents, the oldest first."""


class ReadBundle(Request[bytes], frozen=True):
    """At most `n` bytes of a file of a bundle, from `offset` on; none beyond its end."""

    bundle: str
    name: str
    offset: Count
    n: Count


class Profiles(Request[profiles.Profiles], frozen=True):
    """The profiles of the session, and the one that is being made."""


class ReadProfile(Request[bytes], frozen=True):
    """At most `n` bytes of a file of a profile, from `offset` on; none beyond its end."""

    profile: str
    name: str
    offset: Count
    n: Count
