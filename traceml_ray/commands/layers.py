"""The command `traceml-ray layers`: where the time of a step goes inside the model, on which rank."""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from traceml_ray import text
from traceml_ray.commands import which
from traceml_ray.signals.layers.view import GetLayers
from traceml_ray.text import log, show
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

LIMIT_S = 600.0
"""How long the ranks are waited for; they go on all the same."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray layers`."""
    which.add_session(command)
    command.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"first measure this many steps of a running session, 1 to {wire.MAX_LAYER_STEPS}",
    )
    command.add_argument("--run", help="a run's id or name (default: the newest)")
    command.add_argument("--json", action="store_true", help="print data instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Show the time of each layer of the model, and which layer is slower on one rank."""
    from traceml_ray.document.json import as_json
    from traceml_ray.launchers.control import ControlError, check_goes_on, request
    from traceml_ray.signals.layers.view import render_layers
    from traceml_ray.store import session
    from traceml_ray.views.layer_call import measured

    folder, answers = which.stored(arguments)
    asked = secrets.token_hex(8)
    try:
        if arguments.steps is None:
            layers = answers.answer(GetLayers(arguments.run))
        else:
            wanted = wire.LayersRequest.checked(arguments.steps, arguments.run)
            check_goes_on(folder, arguments.run)
            request(
                folder,
                wire.ControlRequest(codec.VERSION, asked, wire.MeasureRequest(asked, layers=wanted)),
                LIMIT_S,
            )
            with text.progress_bar("layers"):
                layers = measured(
                    answers.answer,
                    asked,
                    arguments.run,
                    LIMIT_S,
                    goes_on=lambda: session.holder(folder) is not None,
                )
    except ValueError as error:
        log(error)
        return 2
    except ControlError as error:
        log(error)
        return 1
    finally:
        answers.close()
    if arguments.json:
        show(as_json(layers), end="")
    elif layers.ranks:
        show(render_layers(layers), end="")
    else:
        log(_nothing(folder, arguments.steps))
    return 0 if layers.ranks else 1


def _nothing(folder: Path, steps: int | None) -> str:
    name = folder.name
    if steps is not None:
        return f"no rank of session {name!r} has measured its layers; `traceml-ray status` may say why"
    return (
        f"no layer was measured in session {name!r}; start the job with --deep, or ask for some steps with "
        "--steps while it runs"
    )
