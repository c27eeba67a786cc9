"""The command `check`: measures the nodes by themselves, and names what is slower than its peers."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import msgspec

from traceml_ray import text
from traceml_ray.text import one_line, show

_LEAST_S, _MOST_S = 2.0, 3600.0


def check_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray check`."""
    command.add_argument(
        "--seconds",
        type=_seconds,
        default=20.0,
        metavar="S",
        help="about how long to measure (default: 20)",
    )
    command.add_argument("--path", type=Path, help="file or folder whose disk is read (default: no disk)")
    command.add_argument(
        "--disturb", action="store_true", help="measure also what a running job uses; it is slower meanwhile"
    )
    command.add_argument("--json", action="store_true", help="print data instead of text")


def _seconds(given: str) -> float:
    try:
        value = float(given.removesuffix("s"))
    except ValueError:
        value = math.nan
    if not _LEAST_S <= value <= _MOST_S:
        raise argparse.ArgumentTypeError(f"{one_line(given)} is no number from {_LEAST_S:g} to {_MOST_S:g}")
    return value


def check(arguments: argparse.Namespace) -> int:
    """Measure CPU, memory, GPUs and disk by themselves, and name what is slower than its peers."""
    from traceml_ray.document.json import as_json
    from traceml_ray.document.text import page
    from traceml_ray.signals.check.conclusion import concluded
    from traceml_ray.signals.check.coordinator import Coordinator, Plan
    from traceml_ray.signals.check.nodes import LocalNode
    from traceml_ray.signals.check.view import blocks

    path = str(arguments.path.absolute()) if arguments.path else ""
    plan = Plan(seconds=arguments.seconds, path=path, disturb=arguments.disturb)
    node = LocalNode("this machine")
    try:
        with text.progress_bar("check") as advance:
            outcome = Coordinator([node], plan, advance).run()
        result = concluded(outcome)
    finally:
        node.end()
    show(as_json(msgspec.to_builtins(result)) if arguments.json else page(blocks(result)), end="")
    if not result.levels:
        return 1
    return 3 if result.slow else 0
