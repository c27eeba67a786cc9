"""`traceml-ray profile`: tables, a comparison of ranks and a merged trace from stored traces."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TextIO

from traceml_ray import text
from traceml_ray.files import write_file
from traceml_ray.identity import RankFilterError, rank_filter
from traceml_ray.reports.profiles import render_difference, render_operations
from traceml_ray.store.profiles import MAX_RANKS, Profile, StoredProfile, profiles_of
from traceml_ray.text import log, show
from traceml_ray.traces.chrome import TraceError
from traceml_ray.traces.difference import MEDIAN, Difference, RecordingError, difference
from traceml_ray.traces.key_averages import (
    ColumnError,
    FormatError,
    Operation,
    key_averages,
    select,
    sort,
    to_csv,
    to_json,
    to_parquet,
)
from traceml_ray.traces.merged_trace import merge
from traceml_ray.traces.sources import Source, sources_of_files, sources_of_profile

_MERGED = "merged-trace.json.gz"
_TOP = 30
_SORT = "self_cpu_ms"
_WRITERS = {"csv": to_csv, "parquet": to_parquet}


class ViewError(ValueError):
    """The requested view cannot be shown; the message says why."""


def run(folder: Callable[[], Path], arguments: argparse.Namespace) -> int:
    """
    Show what is asked for; return the exit code.

    Args:
        folder: returns the folder of the session.
        arguments: of the command.
    """

    def load_sources() -> tuple[Sequence[Source], Profile | None]:
        if arguments.files:
            return _files(arguments), None
        stored = _stored(folder(), arguments.id)
        return sources_of_profile(stored), stored.profile

    return _run_view(load_sources, arguments)


def show_stored(stored: StoredProfile, arguments: argparse.Namespace) -> int:
    """Show what is asked for of this profile; return the exit code."""
    return _run_view(lambda: (sources_of_profile(stored), stored.profile), arguments, named=True)


def _run_view(
    load_sources: Callable[[], tuple[Sequence[Source], Profile | None]],
    arguments: argparse.Namespace,
    named: bool = False,
) -> int:
    try:
        sources, profile = load_sources()
        chosen = _chosen(sources, arguments)
        _print_views(chosen, profile, arguments)
        if profile is not None and not named:
            _note(chosen, profile, arguments)
    except (ViewError, TraceError, RecordingError, ColumnError, RankFilterError, FormatError) as error:
        log(error)
        return 2
    return 0


def _files(arguments: argparse.Namespace) -> list[Source]:
    if arguments.session != "merge":
        raise ViewError(f"{arguments.files[0]}: write `profile merge TRACE …` for traces of your own")
    if arguments.id:
        raise ViewError("--id names a profile of a session; for `merge`, give the profile's folder")
    if not any((arguments.table, arguments.json, arguments.csv, arguments.parquet, arguments.diff)):
        arguments.trace = arguments.trace or Path(_MERGED)
    sources = sources_of_files([Path(file) for file in arguments.files])
    if arguments.trace and any(_same(arguments.trace, source.path) for source in sources):
        raise ViewError(f"--trace {arguments.trace} is one of the input traces and would be overwritten")
    return sources


def _same(out: Path, path: Path) -> bool:
    return out.exists() and path.exists() and out.samefile(path)


def _chosen(sources: Sequence[Source], arguments: argparse.Namespace) -> Sequence[Source]:
    """Return the traces of --ranks, and of the ranks that --diff names."""
    if not sources:
        raise ViewError("no rank was captured: there is no trace to show")
    if arguments.ranks == "all":
        return sources
    ranks, named = rank_filter(arguments.ranks), _pair(arguments.diff) if arguments.diff else ()
    chosen = [
        source
        for source in sources
        if source.rank is not None and (source.rank in ranks or source.rank in named)
    ]
    if not chosen:
        traced_ranks = text.ranks(source.rank for source in sources if source.rank is not None)
        raise ViewError(f"no trace of --ranks {arguments.ranks[:40]}: there are traces of {traced_ranks}")
    return chosen


def _note(sources: Sequence[Source], profile: Profile, arguments: argparse.Namespace) -> None:
    """Print which profile is shown if none was named, and which of --ranks it has no trace of."""
    asked = itertools.chain.from_iterable(rank_filter(arguments.ranks).ranges or ())
    lacking = {*itertools.islice(asked, MAX_RANKS)} - {source.rank for source in sources}
    without = f" There is no trace of {text.ranks(lacking)}." if lacking else ""
    if lacking or not arguments.id:
        show(f"This is profile {profile.id}, {profile.extent}: {profile.why}{without}", file=sys.stderr)


def _stored(folder: Path, name: str | None) -> StoredProfile:
    there = profiles_of(folder)
    matching = [stored for stored in there if name in (None, stored.profile.id)]
    if matching:
        return matching[-1]
    available = (
        text.listed([stored.profile.id for stored in there[-5:]]) or "none; `traceml-ray profile` makes one"
    )
    raise ViewError(f"no profile {name or ''!s} in {folder}; profiles there: {available}".replace("  ", " "))


def _print_views(sources: Sequence[Source], profile: Profile | None, arguments: argparse.Namespace) -> None:
    # What is printed as JSON is one document, and nothing but that.
    messages = sys.stderr if arguments.json else sys.stdout
    document: dict[str, Difference | Sequence[Operation]] = {}
    if arguments.trace:
        with text.progress_bar("merging") as bar:
            merged = merge(sources, arguments.trace, profile, lambda done: bar("merging", done))
        matched = f"{text.count(merged.collectives, 'collective')} matched"
        made = f"{arguments.trace}: {text.count(len(sources), 'rank')}, {matched}"
        show("\n".join([made, *merged.notes]), file=messages)
    if arguments.diff:
        rank, beside = _pair(arguments.diff)
        compared = document["difference"] = difference(sources, rank, beside, arguments.stage)
        if not arguments.json:
            show(render_difference(compared, arguments.top or 15), end="")
    alone = arguments.json and not arguments.diff
    none = not any((arguments.trace, arguments.diff, arguments.csv, arguments.parquet, arguments.json))
    table = arguments.table or none or alone
    if table or arguments.csv or arguments.parquet:
        rows = _operations(sources, arguments, messages)
        if arguments.json and table:
            document["operations"] = rows
        elif table:
            show(render_operations("Operations", rows[: arguments.top or _TOP]), end="")
    if arguments.json:
        (shown,) = document.values() if len(document) == 1 else (document,)
        show(to_json(shown).decode(), end="")


def _pair(given: str) -> tuple[int, int | Literal["median"]]:
    rank, comma, beside = (part.strip() for part in given.partition(","))
    if rank.isdecimal() and (beside.isdecimal() or beside == MEDIAN or not comma):
        return int(rank), int(beside) if beside.isdecimal() else MEDIAN
    raise ViewError(f"--diff {given[:40]!r}: write two ranks, as 5,2, or 5,{MEDIAN}")


def _operations(
    sources: Sequence[Source], arguments: argparse.Namespace, messages: TextIO
) -> Sequence[Operation]:
    """Return the requested rows. They are also written to the requested files."""
    with text.progress_bar("reading"):
        operations = key_averages(_counted(sources), arguments.by_shape)
    rows = select(sort(operations, arguments.sort or _SORT), arguments.name, top=arguments.top)
    for name, write in _WRITERS.items():
        if out := getattr(arguments, name):
            write_file(out, write(rows))
            show(f"{out}: {text.count(len(rows), 'row')}", file=messages)
    return rows


def _counted(sources: Sequence[Source]) -> Iterator[Source]:
    for number, source in enumerate(sources):
        text.advance(f"reading {source.label}", number / len(sources))
        yield source
