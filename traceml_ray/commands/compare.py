"""The command `traceml-ray compare`: two sessions, and whether the second is worse."""

from __future__ import annotations

import argparse
import math
from typing import Any

from traceml_ray import text
from traceml_ray.commands import which
from traceml_ray.commands.completion import names_of_sessions
from traceml_ray.text import log, one_line, show


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray compare`."""
    judged = f"session that is judged ({which.DEFAULT})"
    both: list[Any] = [
        command.add_argument("a", metavar="A", help=f"session to compare with: {which.NAMED}"),
        command.add_argument("b", nargs="?", metavar="B", help=judged),
    ]
    for argument in both:
        argument.completer = names_of_sessions
    which.add_folder(command)
    which.add_wait(command)
    for side in "ab":
        command.add_argument(
            f"--run-{side}", metavar="RUN", help=f"run of {side.upper()} (default: the newest)"
        )
    command.add_argument("--json", action="store_true", help="print data instead of text")
    command.add_argument(
        "--fail-on-regression",
        type=percent,
        metavar="5%",
        help="exit with 3 if B's step is slower by at least this share, with 1 if undecidable",
    )


def percent(given: str) -> float:
    """Return "5%" or "5" as 5.0. Raises ArgumentTypeError."""
    try:
        value = float(given.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 < value <= 1000:
        raise argparse.ArgumentTypeError(f"{one_line(given)} is no percentage above 0, as 5%")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Show whether session B is faster or slower than A, by how much, in which stage and on which ranks."""
    from traceml_ray.reports.comparison import DEFAULT_PCT, compare, regressed, render_comparison, to_json

    gate = arguments.fail_on_regression
    a, b = (which.wait_for_folder(name, arguments) for name in (arguments.a, arguments.b))
    with text.progress_bar("compare"):
        comparison = compare(
            a,
            b,
            run_a=arguments.run_a,
            run_b=arguments.run_b,
            out=arguments.out,
            least_pct=None if gate is None else min(gate, DEFAULT_PCT),
        )
    show(to_json(comparison) if arguments.json else render_comparison(comparison), end="")
    if gate is None:
        return 0
    if comparison.word is None:
        log(comparison.headline)
        return 1
    return 3 if regressed(comparison, gate) else 0
