"""
Bundles, `<session folder>/bundles/<UTC time>-<reason>/`: what is kept of an incident.

`session.sqlite` in it has the last minutes of every rank (`store.excerpt`) and is read as any session is;
`manifest.json` says who, when and why. A bundle appears by one rename, so whoever sees it sees it whole.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from traceml_ray import text
from traceml_ray.files import free_name, read_part, stamp
from traceml_ray.signals.output.last_lines import LastOutput
from traceml_ray.store.session import read_json

FOLDER = "bundles"
MANIFEST = "manifest.json"
SCHEMA = "traceml_ray/bundle/1"
_UNFINISHED = ".unfinished-"
Reason = Literal["hang", "oom", "exception", "killed", "terminated", "request"]
REASONS: tuple[Reason, ...] = get_args(Reason)
"""Where no rank died, the first of these is the reason."""


class BundleCause(msgspec.Struct, frozen=True):
    """What made a bundle, or came within the same incident."""

    reason: Reason
    t_ns: int
    why: str
    """A sentence."""
    run: str | None = None
    rank: int | None = None
    step: int | None = None
    stage: str | None = None
    where: str | None = None
    """The name that `capture_oom` was given."""
    error: str | None = None
    """Exception of the rank, as `Type: text`."""
    traceback: str | None = None
    """Last calls of the exception's traceback."""
    fatal: bool = False
    """A rank died of it."""
    process: int | None = None
    """Id of that rank process in the session file."""
    request: str | None = None
    """Id of the request."""

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from others, however much becomes known of it later."""
        if self.fatal:
            return "died", self.run, self.rank if self.process is None else f"process {self.process}"
        if self.reason == "terminated":
            return (self.reason,)
        return self.reason, self.run, self.rank, self.request or self.t_ns


class Manifest(msgspec.Struct, kw_only=True):
    """What `manifest.json` holds. None is not known."""

    schema: str = SCHEMA
    session: str
    run: str | None
    reason: Reason
    time: str
    """Time of the first cause, ISO 8601 in UTC."""
    t_ns: int
    why: str
    """A sentence: who, and why."""
    rank: int | None
    """The rank that is named first."""
    node: str | None
    step: int | None
    stage: str | None
    exception: str | None
    """Exception of that rank, as `Type: text`."""
    traceback: str | None
    """Last calls of the exception's traceback."""
    output: list[LastOutput] = []
    """What the ranks that are named printed last: `rank`, and `lines` as of `Session.output`."""
    causes: list[BundleCause]
    """All that happened, in order of arrival."""
    deaths: list[dict[str, Any]]
    """Ranks of the run that died, the first cause first, as in `Session.deaths`."""
    ranks: dict[str, Any]
    """Each rank of the run, as in `ranks` of the summary."""
    silent_ranks: list[int]
    """Ranks that never reported."""
    environment: list[dict[str, Any]]
    """Versions and the allocator's configuration: `ranks` with the same, and `values` by name."""
    memory_from: list[dict[str, Any]]
    """Where samples of memory come from: `ranks` with the same, and `values` by field."""
    settings: dict[str, str]
    """Settings of the session that differ from the defaults."""
    traceml_ray: str
    """The version that wrote this."""
    files: dict[str, int]
    """Bytes by name, without this file."""
    left_out: dict[str, str] = {}
    """Files that are not here, and why."""


@dataclass(frozen=True)
class Bundle:
    """One bundle of a session."""

    path: Path
    manifest: Manifest
    files: dict[str, int]
    """Bytes by name."""


def bundles_of(folder: Path) -> list[Bundle]:
    """Return the bundles in a session folder, the oldest first; a folder that is none is left out."""
    bundles = []
    for path in _folders(folder / FOLDER):
        with contextlib.suppress(OSError, ValueError):
            bundles.append(Bundle(path, read_json(path / MANIFEST, Manifest), _files(path)))
    return bundles


def names_of(folder: Path) -> list[str]:
    """Return the names of the bundles in a session folder, the oldest first, without reading any."""
    return [path.name for path in _folders(folder / FOLDER)]


def kept_why(path: Path) -> str:
    """Return when and why the bundle in `path` was kept, "" where that is none."""
    try:
        manifest = read_json(path / MANIFEST, Manifest)
    except (OSError, ValueError):
        return ""
    return f"{text.dated(manifest.time)}: {manifest.why}"


def bundle_files(path: Path) -> list[str]:
    """Return the names of the files of the bundle in `path`; none where that is no bundle."""
    return list(_files(path)) if (path / MANIFEST).is_file() else []


def new_name(folder: Path, t_ns: int, reason: str) -> str:
    """Return a free name for a bundle of that moment."""
    return free_name(f"{stamp(t_ns)}-{reason}", names_of(folder))


def read_bundle(folder: Path, bundle: str, name: str, offset: int, n: int) -> bytes:
    """Return a part of a file of a bundle; empty beyond its end, and where there is no such file."""
    path = folder / FOLDER / bundle
    if bundle not in names_of(folder) or name not in _files(path):
        return b""
    try:
        return read_part(path / name, offset, n)
    except OSError:  # it was removed
        return b""


@contextlib.contextmanager
def making(folder: Path, name: str, instead_of: str | None = None) -> Iterator[Path]:
    """
    Give an empty folder that becomes bundle `name` of the session in `folder` at the end of the block, in
    place of `instead_of`; after an exception nothing has changed. Raises OSError.
    """
    here = folder / FOLDER
    here.mkdir(mode=0o700, exist_ok=True)
    for left in here.glob(f"{_UNFINISHED}*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    made = here / f"{_UNFINISHED}{name}"
    made.mkdir(mode=0o700)
    try:
        yield made
        if instead_of is not None:
            old = here / f"{_UNFINISHED}old-{instead_of}"
            with contextlib.suppress(FileNotFoundError):  # somebody has removed it
                (here / instead_of).rename(old)
            made.rename(here / name)
            shutil.rmtree(old, ignore_errors=True)
        else:
            made.rename(here / name)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def prune(folder: Path, most: int, most_bytes: int) -> list[str]:
    """Remove the oldest bundles until there are at most so many, and bytes; return their names."""
    kept = [(path, sum(_files(path).values())) for path in _folders(folder / FOLDER)]
    removed = []
    while kept and (len(kept) > most or sum(size for _, size in kept) > most_bytes):
        path, _ = kept.pop(0)
        shutil.rmtree(path, ignore_errors=True)
        removed.append(path.name)
    return removed


def _folders(place: Path) -> list[Path]:
    """Return the folders of bundles; their names begin with their time."""
    try:
        folders = [path for path in place.iterdir() if path.is_dir() and not path.is_symlink()]
    except (OSError, ValueError):  # a name that no file can have
        return []
    return sorted(path for path in folders if path.name[:1].isdigit())


def _files(path: Path) -> dict[str, int]:
    """Return the regular files in a bundle, with their bytes."""
    sizes = {}
    with contextlib.suppress(OSError):
        for file in sorted(path.iterdir()):
            if file.is_file() and not file.is_symlink():
                sizes[file.name] = file.stat().st_size
    return sizes
