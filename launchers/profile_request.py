"""Asks a live session for a profile over its local socket, and follows it by the files in its folder."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from traceml_ray import text
from traceml_ray.launchers.control import ControlError, check_goes_on, request
from traceml_ray.store.profiles import OVER, Profile, StoredProfile, profiles_of, under_way
from traceml_ray.store.session import holder
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

LIMIT_S = 600.0
"""How long to wait for a capture, in s; the capture goes on afterwards."""
_POLL_S = 0.2
_GONE_S = 10.0
"""A profile that was in progress and has been missing for this long, in s, could not be kept."""


def profile(folder: Path, wanted: wire.ProfileRequest, limit_s: float = LIMIT_S) -> StoredProfile:
    """
    Have steps of the live session in `folder` profiled, and wait for it.

    Raises ControlError when the session is not live, does not answer, its run is over, or the profile is not
    there within `limit_s` seconds.
    """
    asked, deadline = secrets.token_hex(8), time.monotonic() + limit_s
    text.advance("profile: waiting", None)
    check_goes_on(folder, wanted.run)
    request(folder, wire.ControlRequest(codec.VERSION, asked, wire.MeasureRequest(asked, wanted)), limit_s)
    goes_on, seen_s = True, None
    while goes_on and time.monotonic() < deadline:
        goes_on = holder(folder) is not None
        for stored in reversed(profiles_of(folder)):
            if asked in stored.profile.requests:
                return stored
        now = under_way(folder)
        what, share = "waiting", None
        if now is not None and asked in now.requests:
            seen_s, (what, share) = time.monotonic(), so_far(now)
        elif seen_s is not None and time.monotonic() - seen_s > _GONE_S:
            raise ControlError(
                f"session {folder.name!r} could not keep the profile; `traceml-ray status` may say why"
            )
        text.advance(f"profile: {what}", share)
        time.sleep(_POLL_S)
    if not goes_on:
        raise ControlError(f"session {folder.name!r} has ended before there was a profile")
    raise ControlError(
        f"session {folder.name!r} has made no profile within {limit_s:g} s; `traceml-ray status` may say "
        "why, and `traceml-ray profile --list` whether it came later"
    )


def so_far(now: Profile) -> tuple[str, float]:
    """Return the current phase of a profile in progress, and its progress from 0 to 1."""
    ranks = now.ranks
    if any(rank.state == "sending" for rank in ranks):
        total = sum(rank.total_bytes or 0 for rank in ranks)
        return "sending", sum(rank.bytes for rank in ranks) / total if total else 0.0
    done = sum(len(rank.steps) for rank in ranks if rank.state not in OVER)
    if any(rank.state == "recording" for rank in ranks):
        wanted = now.n_steps * sum(rank.state not in OVER for rank in ranks)
        return f"recording step {now.first_step} and after", done / wanted if wanted else 0.0
    return f"waiting for step {now.first_step}", 0.0
