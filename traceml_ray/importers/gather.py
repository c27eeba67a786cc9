"""Finds what can be read under the paths that a person gives, and reads it, file by file."""

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
"""Files that stand beside samples."""


@dataclass
class FileRead:
    """A file, or a folder that belongs together, and what it gave."""

    path: Path
    contents: FileContents


@dataclass
class Gathered:
    """What was found under some paths."""

    files: list[FileRead] = field(default_factory=list)
    refused: dict[Path, str] = field(default_factory=dict)
    """Files that are not used, and why."""
    passed_over: list[Path] = field(default_factory=list)
    """Files in folders in which there is nothing about memory."""


Read = Callable[[Path], FileContents]


def gather(paths: Iterable[Path]) -> Gathered:
    """Read every file that is meant by `paths`, once; one that cannot be read stops none of the others."""
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
        ) as error:  # no name that a file can have, a circle of links
            gathered.refused[given] = _reason(error)
    return gathered


def _files(given: Path, gathered: Gathered) -> Iterator[Path]:
    """Yield the files that a path stands for."""
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
    """Return how a file is read. Another kind of file is added here; a folder read as one, in `_walk`."""
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
    Yield what can be read in a folder and those below it, in order of name. Of a session only its file is:
    all else is made from that.
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
    """Read a file; one without samples of memory is refused where it was `given`, not where a folder was."""
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
        else:  # another program's database
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
    """Return the rank in the name of a file, else of the folders it is in, the nearest first."""
    top = given.parent if path != given else given.parent.parent
    names = [
        path.stem,
        *(folder.name for folder in path.parents if folder.is_relative_to(top) and folder != top),
    ]
    return next((rank for rank in map(rank_in_name, names) if rank is not None), None)
