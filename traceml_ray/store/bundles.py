"""
Bundles: the files that are kept of an incident, in `<session folder>/bundles/<UTC time>-<reason>/`.

`session.sqlite` in the bundle holds the last minutes of every rank (`store.excerpt`); it is read like any
session. `manifest.json` says which ranks are concerned, when and why. A bundle appears by one rename, so a
reader sees a complete bundle or none.
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
"""Kinds of incidents. If no rank died, the first of these that applies is the bundle's reason."""


class BundleCause(msgspec.Struct, frozen=True):
    """A cause of a bundle, or an event of the same incident."""

    reason: Reason
    t_ns: int
    why: str
    """One sentence that says what happened."""
    run: str | None = None
    rank: int | None = None
    step: int | None = None
    stage: str | None = None
    where: str | None = None
    """Name that was given to `capture_oom`; None: none."""
    error: str | None = None
    """Exception of the rank, as `Type: text`."""
    traceback: str | None = None
    """Last calls of the exception's traceback."""
    fatal: bool = False
    """Whether a rank died of it."""
    process: int | None = None
    """Id of the rank process in the session file; None: no rank process is concerned."""
    request: str | None = None
    """Id of the request for the bundle; None: nobody requested it."""

    @property
    def key(self) -> tuple[object, ...]:
        """Identity of the cause. It stays the same when more becomes known about the cause."""
        if self.fatal:
            return "died", self.run, self.rank if self.process is None else f"process {self.process}"
        if self.reason == "terminated":
            return (self.reason,)
        return self.reason, self.run, self.rank, self.request or self.t_ns


class Manifest(msgspec.Struct, kw_only=True):
    """Contents of `manifest.json`. None: not known."""

    schema: str = SCHEMA
    session: str
    run: str | None
    reason: Reason
    time: str
    """Time of the first cause, ISO 8601 in UTC."""
    t_ns: int
    why: str
    """One sentence that says which rank is concerned, and why the bundle was made."""
    rank: int | None
    """Global rank that is named first."""
    node: str | None
    step: int | None
    stage: str | None
    exception: str | None
    """Exception of that rank, as `Type: text`."""
    traceback: str | None
    """Last calls of the exception's traceback."""
    output: list[LastOutput] = []
    """Last printed lines of the named ranks, with `rank` and `lines` as in `Session.output`."""
    causes: list[BundleCause]
    """All causes of the incident, in order of arrival."""
    deaths: list[dict[str, Any]]
    """Ranks of the run that died, the first cause first, as in `Session.deaths`."""
    ranks: dict[str, Any]
    """Each rank of the run, as in `ranks` of the summary."""
    silent_ranks: list[int]
    """Global ranks that never reported."""
    environment: list[dict[str, Any]]
    """
    Versions and the allocator's configuration. Each entry has `values` by name, and the `ranks` with these
    values.
    """
    memory_from: list[dict[str, Any]]
    """Sources of the memory samples. Each entry has `values` by field, and the `ranks` with these values."""
    settings: dict[str, str]
    """Settings of the session that differ from the defaults."""
    traceml_ray: str
    """Version of this package that wrote the file."""
    files: dict[str, int]
    """Size of each file of the bundle except this one: file name → bytes."""
    left_out: dict[str, str] = {}
    """Files that the bundle lacks: file name → reason."""


@dataclass(frozen=True)
class Bundle:
    """One bundle of a session."""

    path: Path
    manifest: Manifest
    files: dict[str, int]
    """Size of each file: file name → bytes."""


def bundles_of(folder: Path) -> list[Bundle]:
    """Return the bundles in a session folder, the oldest first. Folders that are not bundles are left out."""
    bundles = []
    for path in _folders(folder / FOLDER):
        with contextlib.suppress(OSError, ValueError):
            bundles.append(Bundle(path, read_json(path / MANIFEST, Manifest), _files(path)))
    return bundles


def names_of(folder: Path) -> list[str]:
    """Return the names of the bundles in a session folder, the oldest first, without reading the bundles."""
    return [path.name for path in _folders(folder / FOLDER)]


def kept_why(path: Path) -> str:
    """Return when and why the bundle in `path` was kept; "" if `path` is not a bundle."""
    try:
        manifest = read_json(path / MANIFEST, Manifest)
    except (OSError, ValueError):
        return ""
    return f"{text.dated(manifest.time)}: {manifest.why}"


def bundle_files(path: Path) -> list[str]:
    """Return the names of the files of the bundle in `path`; an empty list if `path` is not a bundle."""
    return list(_files(path)) if (path / MANIFEST).is_file() else []


def new_name(folder: Path, t_ns: int, reason: str) -> str:
    """Return a name that no bundle has yet, for a bundle of time `t_ns`."""
    return free_name(f"{stamp(t_ns)}-{reason}", names_of(folder))


def read_bundle(folder: Path, bundle: str, name: str, offset: int, n: int) -> bytes:
    """
    Return at most `n` bytes of a file of a bundle, from `offset` on. Empty beyond the file's end, or if there
    is no such file.
    """
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
    Yield an empty folder. At the end of the block it becomes the bundle `name` of the session in `folder`,
    and replaces the bundle `instead_of`. An exception in the block leaves everything as it was. Raises
    OSError.
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
    """
    Remove the oldest bundles until at most `most` are left, with at most `most_bytes` in all. Return the
    names of the removed ones.
    """
    kept = [(path, sum(_files(path).values())) for path in _folders(folder / FOLDER)]
    removed = []
    while kept and (len(kept) > most or sum(size for _, size in kept) > most_bytes):
        path, _ = kept.pop(0)
        shutil.rmtree(path, ignore_errors=True)
        removed.append(path.name)
    return removed


def _folders(place: Path) -> list[Path]:
    """Return the folders of bundles in order of time: their names begin with the time."""
    try:
        folders = [path for path in place.iterdir() if path.is_dir() and not path.is_symlink()]
    except (OSError, ValueError):  # a name that no file can have
        return []
    return sorted(path for path in folders if path.name[:1].isdigit())


def _files(path: Path) -> dict[str, int]:
    """Return the regular files of a bundle with their sizes: file name → bytes."""
    sizes = {}
    with contextlib.suppress(OSError):
        for file in sorted(path.iterdir()):
            if file.is_file() and not file.is_symlink():
                sizes[file.name] = file.stat().st_size
    return sizes
