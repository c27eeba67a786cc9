"""The command `check`: measures the nodes by themselves, and names what is slower than its peers."""

from __future__ import annotations

import argparse
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from traceml_ray import text
from traceml_ray.text import one_line, show

if TYPE_CHECKING:
    from traceml_ray.signals.check.coordinator import Outcome
    from traceml_ray.signals.check.tasks import Plan

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
    command.add_argument(
        "--ray-address",
        type=_address,
        default=os.environ.get("RAY_ADDRESS") or None,
        metavar="HOST:PORT",
        help="Ray cluster whose nodes are checked (default: RAY_ADDRESS, else this machine)",
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


def _address(given: str) -> str:
    """Return "host:port". Raises ArgumentTypeError."""
    if not re.fullmatch(r"[^\s/]+:\d{1,5}", given):
        raise argparse.ArgumentTypeError(f"{one_line(given)} is not host:port, of the cluster's GCS")
    return given


def check(arguments: argparse.Namespace) -> int:
    """
    Measure the nodes of a Ray cluster (or this machine) by themselves: CPU, memory, GPUs, disk, and the links
    between nodes. Name what is slower than its peers.
    """
    from traceml_ray.document.json import as_json
    from traceml_ray.document.text import page
    from traceml_ray.signals.check.conclusion import concluded
    from traceml_ray.signals.check.tasks import Plan
    from traceml_ray.signals.check.view import blocks

    path = str(arguments.path.absolute()) if arguments.path else ""
    plan = Plan(seconds=arguments.seconds, path=path, disturb=arguments.disturb)
    with text.progress_bar("check") as advance:
        outcome = _checked(arguments.ray_address, plan, advance)
    result = concluded(outcome)
    show(as_json(msgspec.to_builtins(result)) if arguments.json else page(blocks(result)), end="")
    code = 3 if result.slow or outcome.silent else 0 if result.levels else 1
    if arguments.ray_address:
        text.exit_now(code)  # Ray's own end may take long
    return code


def _checked(address: str | None, plan: Plan, advance: text.Progress) -> Outcome:
    """Check the nodes of the Ray cluster at `address`; None: this machine. Raises ConnectionError."""
    from traceml_ray.signals.check.coordinator import Coordinator
    from traceml_ray.signals.check.nodes import LocalNode

    if address:
        from traceml_ray.ray.check import check_at

        return check_at(address, plan, advance)
    node = LocalNode("this machine")
    try:
        return Coordinator([node], plan, advance).run()
    finally:
        node.end()
