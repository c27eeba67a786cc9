"""Finds readable files under the paths that a user gives, and reads them one by one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from traceml_ray import text
from traceml_ray.identity import rank_in_name
from traceml_ray.importers import stormlog
from traceml_ray.signals.memory import view
from traceml_ray.signals.memory.recordings import (
    FileContents,
    NoSamplesError,
    RefusedFileError,
)
from traceml_ray.store.schema import SessionFileError
from traceml_ray.store.session import DATABASE

_MOST_FILES = 100_000
_BESIDE = {
    *("manifest.json", "environment.json", "metadata.json", "rollups.json"),
    *("diagnostic_summary.json", "report.json", "summary.json"),
}
"""Files that accompany files with samples."""


@dataclass
class FileRead:
    """A file, or a folder whose files belong together, and its contents."""

    path: Path
    contents: FileContents


@dataclass
class Gathered:
    """The files under some paths, with their contents."""

    files: list[FileRead] = field(default_factory=list)
    refused: dict[Path, str] = field(default_factory=dict)
    """File that is not used → the reason."""
    passed_over: list[Path] = field(default_factory=list)
    """Files in folders that contain no memory samples."""


Read = Callable[[Path], FileContents]


def gather(paths: Iterable[Path]) -> Gathered:
    """Read every file that `paths` refer to, once. A file that cannot be read does not stop the others."""
    gathered, seen = Gathered(), set[Path]()
    for given in paths:
        try:
            for path in _files(given, gathered):
                if (real := path.resolve()) not in seen:
                    seen.add(real)
                    text.advance(f"reading {path.name}", None)
                    _read(gathered, path, given)
        except (
            OSError,
            ValueError,
            RuntimeError,
        ) as error:  # not a valid file name, or a cycle of links
            gathered.refused[given] = _reason(error)
    return gathered


def _files(given: Path, gathered: Gathered) -> Iterator[Path]:
    """Yield the files that a path refers to."""
    if not given.is_dir():
        yield given
        return
    for number, path in enumerate(_walk(given, gathered)):
        if number == _MOST_FILES:
            gathered.refused[given] = f"it has more than {_MOST_FILES:,} files; the others are not read"
            return
        yield path


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _reader(path: Path) -> Read:
    """
    Return the reader of a file. Add further kinds of files here; a folder that is read as one is added in
    `_walk`.
    """
    if path.suffix.lower() == ".sqlite":
        return view.read
    if path.suffix.lower() in stormlog.SUFFIXES:
        return stormlog.read_stormlog
    return _unknown


def _unknown(path: Path) -> FileContents:
    path.stat()
    kinds = ", ".join(sorted(stormlog.SUFFIXES))
    raise RefusedFileError(f"it is neither a session ({DATABASE}) nor one of {kinds}")


def _walk(folder: Path, gathered: Gathered) -> Iterator[Path]:
    """
    Yield the readable files in a folder and its subfolders, in order of name. Of a session only the session
    file is read, because everything else is made from it.
    """

    def refuse(error: OSError) -> None:
        gathered.refused[Path(error.filename)] = _reason(error)

    for name, below, files in os.walk(folder, onerror=refuse):
        here = Path(name)
        if DATABASE in files:
            below.clear()
            yield here / DATABASE
            continue
        below.sort()
        yield from (here / file for file in sorted(files) if _reader(here / file) is not _unknown)


def _read(gathered: Gathered, path: Path, given: Path) -> None:
    """
    Read a file. A file without memory samples is refused if it was `given` itself, not if its
    folder was.
    """
    try:
        contents = _reader(path)(path)
    except NoSamplesError as error:
        if path == given:
            gathered.refused[path] = str(error)
        elif path.name not in _BESIDE:
            gathered.passed_over.append(path)
    except SessionFileError as error:
        if path == given or path.name == DATABASE:
            gathered.refused[path] = str(error).removeprefix(f"{path}: ")
        else:  # a database of another program
            gathered.passed_over.append(path)
    except RefusedFileError as error:
        gathered.refused[path] = str(error)
    except OSError as error:
        gathered.refused[path] = _reason(error)
    else:
        for recording in contents.recordings:
            recording.path = path
            if recording.rank is None:
                recording.rank = _rank_in(path, given)
        gathered.files.append(FileRead(path, contents))


def _rank_in(path: Path, given: Path) -> int | None:
    """Return the rank in the name of a file, or else in the names of its folders, the nearest first."""
    top = given.parent if path != given else given.parent.parent
    names = [
        path.stem,
        *(folder.name for folder in path.parents if folder.is_relative_to(top) and folder != top),
    ]
    return next((rank for rank in map(rank_in_name, names) if rank is not None), None)
