"""The command `traceml-ray bundles`: what was kept of a session's incidents."""

from __future__ import annotations

import argparse

from traceml_ray.commands import which
from traceml_ray.store import query
from traceml_ray.text import show


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray bundles`."""
    which.add_session(command)


def run(arguments: argparse.Namespace) -> int:
    """List the bundles of a session: the last minutes of every rank before a death or hang."""
    from traceml_ray.reports.manifest import render_bundles

    folder, answers = which.stored(arguments)
    show(render_bundles(query.ask_one(answers.reply, query.GetBundles()), folder), end="")
    return 0
