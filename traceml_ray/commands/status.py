"""The command `traceml-ray status`: which ranks report, what was lost, what could not be measured."""

from __future__ import annotations

import argparse
import time

from traceml_ray import text
from traceml_ray.commands import which
from traceml_ray.settings import Settings
from traceml_ray.store import session
from traceml_ray.text import show


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray status`."""
    which.add_session(command, waits=None)  # it says of one that is starting that it is
    command.add_argument("--json", action="store_true", help="print data instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Print which ranks report, what was lost, and what could not be measured."""
    from traceml_ray.reports.answers import Answers
    from traceml_ray.reports.status import render_start, render_status, start_json, status_json

    settings = Settings.load(out=arguments.out)
    folder = session.find(arguments.session, settings.out, starting=True)
    live = session.live_state(folder)
    if live is not None and not (folder / session.DATABASE).exists():
        show(start_json(folder, live) if arguments.json else render_start(folder, live), end="")
        return 0
    render = status_json if arguments.json else render_status
    send = Answers(folder, settings.thresholds).reply
    with text.progress_bar(f"status of {folder.name}"):
        shown = render(send, folder, session.holder(folder), time.time_ns())
    show(shown, end="")
    return 0
