"""The command `collectives`: which rank did not join, from torch's flight recorder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from traceml_ray import text
from traceml_ray.commands.completion import names_of_sessions
from traceml_ray.text import log, show


def collectives_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray collectives`."""
    paths: Any = command.add_argument(
        "paths",
        nargs="+",
        metavar="DUMP",
        help="dump of torch's flight recorder (pickle or JSON), one for each rank, or a folder of dumps; the "
        "rank is the number at the end of the name",
    )
    paths.completer = names_of_sessions
    command.add_argument("--json", action="store_true", help="print data instead of text")
    command.add_argument(
        "--hang",
        action="store_true",
        help="the job hung when the dumps were written: a rank that had not joined is named (default: only "
        "if another one had waited for as long as the time-out of its group)",
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
    """Show which rank did not join a collective, or called another one, from torch's dumps of all ranks."""
    from traceml_ray.signals.collectives.calls import CallTable
    from traceml_ray.signals.collectives.dumps import DumpError, dump_files, read_dumps
    from traceml_ray.signals.collectives.examined import as_text, examine, to_json

    refused = list[str]()
    try:
        files = dump_files(map(Path, arguments.paths))
    except DumpError as error:
        log(error)
        return 2
    table = CallTable()
    with text.progress_bar("collectives") as advance:
        for number, rank in enumerate(read_dumps(files, refused)):
            advance(f"rank {rank.rank}", number / len(files))
            table.add(rank)
    for why in refused:
        log(why)
    if not table.ranks:
        if not files:
            log("no file whose name ends with the number of a rank, as nccl_trace_rank_0 does")
        return 2
    world = arguments.world_size or max(file.rank for file in files) + 1
    examined = examine(table, hang=arguments.hang or None, world=world, refused=refused)
    show(to_json(examined) if arguments.json else as_text(examined), end="")
    return 3 if examined.bad else 2 if refused else 0
