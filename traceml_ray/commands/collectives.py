"""The command `collectives`: which rank did not join."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceml_ray import text
from traceml_ray.commands import which
from traceml_ray.commands.completion import names_of_sessions
from traceml_ray.settings import Settings
from traceml_ray.store import session
from traceml_ray.text import log, show

if TYPE_CHECKING:
    from traceml_ray.signals.collectives.examined import Examined


def collectives_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray collectives`."""
    paths: Any = command.add_argument(
        "paths",
        nargs="+",
        metavar="SESSION|DUMP",
        help="name of a session, or a bundle; or dumps of torch's flight recorder (pickle or JSON), one for "
        "each rank, or a folder of dumps: the rank is the number at the end of a name",
    )
    paths.completer = names_of_sessions
    which.add_folder(command)
    command.add_argument("--json", action="store_true", help="print data instead of text")
    command.add_argument(
        "--hang",
        action="store_true",
        help="the job hung when the dumps were written: a rank that had not joined is named (default: only "
        "if the session says so, or another rank had waited for as long as the time-out of its group)",
    )
    command.add_argument(
        "--world-size",
        type=_world,
        metavar="N",
        help="number of ranks of the job (default: the largest rank with a dump, plus 1)",
    )


def _world(given: str) -> int:
    """Return a number of ranks. Raises ArgumentTypeError."""
    if not (given.isdecimal() and 0 < int(given[:8]) <= 1 << 20 and len(given) < 8):
        raise argparse.ArgumentTypeError(f"{text.one_line(given)} is not a number of ranks")
    return int(given)


def collectives(arguments: argparse.Namespace) -> int:
    """
    Show which rank did not join a collective, or called another one: from torch's dumps of all ranks, a
    session, or a bundle.
    """
    from traceml_ray.signals.collectives.examined import as_text, to_json

    folder = _session(arguments)
    examined = _of_dumps(arguments) if folder is None else _of_session(folder, arguments)
    if examined is None:
        return 2
    for why in examined.refused:
        log(why)
    show(to_json(examined) if arguments.json else as_text(examined), end="")
    return 3 if examined.bad else 2 if examined.refused else 0


def _session(arguments: argparse.Namespace) -> Path | None:
    """Return the folder of the named session or bundle. None: the paths are dumps."""
    if len(arguments.paths) > 1:
        return None
    given = arguments.paths[0]
    try:
        return session.find(given, Settings.load(out=arguments.out).out)
    except session.SessionStartingError:
        raise
    except session.SessionError:
        if os.sep not in given and not Path(given).exists() and not any(mark in given for mark in "*?["):
            raise
        return None


def _of_session(folder: Path, arguments: argparse.Namespace) -> Examined | None:
    from traceml_ray.signals.collectives.stored import examine_session
    from traceml_ray.store.schema import legible

    with legible(folder), text.progress_bar(f"collectives of {folder.name}"):
        examined = examine_session(folder / session.DATABASE, hang=arguments.hang or None)
    if examined is None:
        log(f"{folder}: no rank has reported its collectives; they are asked in a hang, and by dump")
    return examined


def _of_dumps(arguments: argparse.Namespace) -> Examined | None:
    from traceml_ray.signals.collectives.calls import CallTable
    from traceml_ray.signals.collectives.dumps import DumpError, dump_files, ranks_of_job, read_dumps
    from traceml_ray.signals.collectives.examined import examine

    refused = list[str]()
    try:
        files = dump_files(map(Path, arguments.paths))
    except DumpError as error:
        log(error)
        return None
    table = CallTable()
    with text.progress_bar("collectives") as advance:
        for number, rank in enumerate(read_dumps(files, refused)):
            advance(f"rank {rank.rank}", number / len(files))
            table.add(rank)
    if not table.ranks:
        for why in refused or [
            "no file whose name ends with the number of a rank, as nccl_trace_rank_0 does"
        ]:
            log(why)
        return None
    world = arguments.world_size or ranks_of_job(files, table.ranks)
    examined = examine(table, hang=arguments.hang or None, world=world, refused=refused)
    if not examined.hang and examined.mismatch is not None and examined.mismatch.kind == "late":
        log(
            "whether the job hung is not in the files: --hang says so, then a rank that did not join is named"
        )
    return examined
