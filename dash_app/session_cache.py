"""
The data from which pages are made: the newest answers about a session, and breakdowns of its profiles.
Breakdowns are computed from the traces on demand and stored next to them.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from traceml_ray import text
from traceml_ray.errors import Errors, error_text
from traceml_ray.files import read_file, write_file
from traceml_ray.store import query
from traceml_ray.store.profiles import MANIFEST, Profile, ProfileInfo, read_profile
from traceml_ray.store.query import QueryError
from traceml_ray.traces.breakdown import MAX_BYTES, Breakdown, decode
from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.views.source import Source

from . import trace_job
from .trace_job import JobError

FILE = "breakdown.msgpack"
"""Name of the file in a profile's folder."""
MAX_COPY = 1 << 30
"""Largest trace, in bytes, that is copied from another node."""
_KEPT = 4
"""Number of profiles whose breakdowns are kept in memory."""
_AGAIN_S = 60.0
"""Time in s after which a failed breakdown is computed again, if it is still viewed."""
_PIECE = 1 << 20


class Breakdowns:
    """
    The breakdowns of a session's profiles, each computed once. Any thread may ask; no thread waits until a
    trace is read.

    Args:
        source: the session.
        errors: counts failures.
        renew: called when another breakdown is ready.
    """

    def __init__(self, source: Source, errors: Errors, renew: Callable[[], None]) -> None:
        self._source, self._errors, self._renew = source, errors, renew
        self._lock = threading.Lock()
        self._made: OrderedDict[str, Breakdown | str | None] = OrderedDict()
        """Result per profile id; None while it is being computed."""
        self._failed: dict[str, float] = {}
        """When the computation failed, per profile id (monotonic seconds)."""

    def get(self, info: ProfileInfo) -> Breakdown | str | None:
        """
        Return the breakdown of a profile. None: it is being computed. A string: the reason why it cannot be
        computed.
        """
        name = info.profile.id
        if not info.profile.captured:
            return "no rank was captured"
        with self._lock:
            made = self._made.get(name)
            tired = isinstance(made, str) and time.monotonic() > self._failed[name] + _AGAIN_S
            if name in self._made and not tired:
                self._made.move_to_end(name)
                return made
            self._made[name] = None
        threading.Thread(target=self._make, args=(info,), name="traceml-traces", daemon=True).start()
        return None

    def _make(self, info: ProfileInfo) -> None:
        result: Breakdown | str
        try:
            with traces_of(self._source, info) as folder:
                result = _read(folder)
        except (JobError, QueryError, OSError, ValueError) as error:
            self._errors.note("traces", error)
            result = str(error)
        except Exception as error:
            self._errors.note("traces", error)
            result = error_text(error)
        with self._lock:
            self._made[info.profile.id] = result
            if isinstance(result, str):
                self._failed[info.profile.id] = time.monotonic()
            done = [name for name, made in self._made.items() if made is not None]
            for name in done[:-_KEPT]:
                del self._made[name]
        self._renew()


def _read(folder: Path) -> Breakdown:
    """Return the stored breakdown of a profile, or make it. Raises JobError, OSError, ValueError."""
    with contextlib.suppress(OSError, ValueError):
        return decode(read_file(folder / FILE, MAX_BYTES))
    with tempfile.TemporaryDirectory(prefix="traceml-") as there:
        out = Path(there) / FILE
        trace_job.run("breakdown", folder, out, wait_s=trace_job.MOST_S)
        data = read_file(out, MAX_BYTES)
    made = decode(data)
    with contextlib.suppress(OSError):  # of a folder that is another user's
        write_file(folder / FILE, data)
    return made


@contextlib.contextmanager
def traces_of(source: Source, info: ProfileInfo) -> Iterator[Path]:
    """
    Context manager: the folder with the traces of a profile, or a copy of it if that is on another node.

    Raises QueryError if the traces cannot be obtained, OSError if there is no room for a copy.
    """
    if is_here(info):
        yield Path(info.path)
        return
    if info.bytes > MAX_COPY:
        raise QueryError(
            f"its traces are on another node, and their {text.size(info.bytes)} exceed the limit for a copy "
            f"({text.size(MAX_COPY)})"
        )
    with tempfile.TemporaryDirectory(prefix="traceml-") as there:
        folder = Path(there)
        (folder / MANIFEST).write_bytes(msgspec.json.encode(info.profile))
        for rank in info.profile.captured:
            with (folder / str(rank.file)).open("wb") as file:
                for piece in pieces(source, info.profile, str(rank.file), rank.total_bytes):
                    file.write(piece)
        yield folder


def is_here(info: ProfileInfo) -> bool:
    """Return whether the folder of a profile is on this machine, or on a disk shared with its machine."""
    with contextlib.suppress(OSError, ValueError):
        profile = read_profile(Path(info.path))
        return (profile.session, profile.t_ns) == (info.profile.session, info.profile.t_ns)
    return False


def pieces(source: Source, profile: Profile, name: str, size: int | None) -> Iterator[bytes]:
    """
    Yield a file of a profile in pieces: `size` bytes, or all of it. Raises QueryError if it has been
    removed.
    """
    offset = 0
    while size is None or offset < size:
        most = _PIECE if size is None else min(_PIECE, size - offset)
        piece = query.ask_one(source.reply, query.ReadProfile(profile.id, name, offset, most))
        if not piece and size is None:
            return
        if not piece:
            raise QueryError(f"profile {profile.id} has been removed")
        offset += len(piece)
        yield piece


class SessionCache(SessionPoll):
    """
    The newest answers about a session (`SessionPoll`, with the same arguments), and breakdowns of its
    profiles.
    """

    def __init__(self, source: Source, **how: Any) -> None:
        super().__init__(source, **how)
        renew = weakref.WeakMethod(self.renew)  # a session that is no longer shown goes at once
        self.breakdowns = Breakdowns(source, self.errors, lambda: (of_this := renew()) and of_this())
