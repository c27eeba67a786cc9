"""Commands that have a running session measure: `profile` some steps, shown, listed and removed; `layers`."""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path

from traceml_ray import text
from traceml_ray.commands import which
from traceml_ray.stages import STAGES
from traceml_ray.text import log, show
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

_RECORDS = "--steps", "--memory", "--stacks", "--shapes", "--run"
"""Options that ask for a recording."""
_LAYERS_LIMIT_S = 600.0
"""Time to wait for ranks that measure their layers, in s. The ranks go on measuring afterwards."""


def profile_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray profile`."""
    which.add_session(command)
    command.add_argument(
        "--ranks", default="all", metavar="0,4-7", help="ranks to profile or to show (default: all)"
    )
    most = wire.MAX_PROFILE_STEPS
    command.add_argument("--steps", type=int, metavar="N", help=f"number of steps, 1 to {most} (default: 3)")
    for name, what in (
        ("memory", "what each operation allocates"),
        ("stacks", "where each is called: slow"),
        ("shapes", "the shapes of its inputs"),
    ):
        command.add_argument(f"--{name}", action="store_true", help=f"also record {what}")
    command.add_argument("--run", help="id or name of the run to record (default: the newest)")
    command.add_argument("--list", action="store_true", help="list the profiles of the session")
    command.add_argument("--remove", metavar="ID", help="remove a profile of the session")
    _add_views(command)


def _add_views(command: argparse.ArgumentParser) -> None:
    """Add the options that show traces."""
    command.add_argument(
        "files",
        nargs="*",
        metavar="TRACE",
        help="after the word merge: your own traces, or folders of traces",
    )
    about = (
        "These use the newest profile of the session, or merge TRACE …, and record nothing. With an "
        f"option that records ({', '.join(_RECORDS)}), they use the new profile. More: docs/profiles.md."
    )
    shown = command.add_argument_group("showing profiles", about)
    shown.add_argument("--id", help="id of the profile (default: the newest)")
    shown.add_argument("--table", action="store_true", help="print the operations")
    shown.add_argument("--json", action="store_true", help="print the operations, or the difference, as JSON")
    shown.add_argument("--csv", type=Path, metavar="OUT", help="write the operations as CSV")
    shown.add_argument(
        "--parquet", type=Path, metavar="OUT", help="write the operations as parquet (needs pyarrow)"
    )
    shown.add_argument("--trace", type=Path, metavar="OUT", help="write one trace of all ranks for Perfetto")
    shown.add_argument(
        "--diff",
        metavar="5,median",
        help="operations that take rank 5 longer than the median of the others, or than another rank",
    )
    shown.add_argument("--stage", choices=STAGES, help="for --diff: only operations of this stage")
    shown.add_argument("--sort", metavar="COLUMN", help="column to sort by (default: self_cpu_ms)")
    shown.add_argument(
        "--name",
        metavar="TEXT",
        help="only operations whose name contains this, or matches a pattern such as aten::*",
    )
    shown.add_argument("--top", type=_number, metavar="N", help="only the first N operations")
    shown.add_argument("--by-shape", action="store_true", help="one row per shape of inputs")


def _views(arguments: argparse.Namespace) -> bool:
    """Return whether existing traces should be shown."""
    output = "table", "json", "csv", "parquet", "trace", "diff"
    return any(
        getattr(arguments, name)
        for name in (*output, "files", "id", "stage", "sort", "name", "top", "by_shape")
    )


def _records(arguments: argparse.Namespace) -> list[str]:
    """Return the options given that ask for a recording."""
    return [name for name in _RECORDS if getattr(arguments, name.removeprefix("--")) not in (None, False)]


def _number(given: str) -> int:
    if not (given.isdecimal() and int(given[:9])):
        raise argparse.ArgumentTypeError(f"{given[:20]!r} is not a number above 0")
    return int(given[:9])


def _contradiction(arguments: argparse.Namespace) -> str | None:
    """Return what is wrong with options that contradict each other. None: nothing is wrong."""
    if arguments.stage and not arguments.diff:
        return f"--stage {arguments.stage} needs --diff, as in --diff 5,median --stage {arguments.stage}"
    alone = [f"--{name}" for name in ("list", "remove") if getattr(arguments, name)]
    if len(alone) > 1 or (alone and _views(arguments)):
        return f"{alone[0]} cannot be combined with an option that shows or removes a profile"
    records = _records(arguments)
    there = "merge" if arguments.files else "--id" if arguments.id else None
    if records and (alone or there):
        return f"{records[0]} records a new profile, {(*alone, there)[0]} is for existing ones"
    if records == ["--run"] and _views(arguments):
        return "--run is for recording a profile: add --steps, or name an existing profile with --id"
    return None


def profile(arguments: argparse.Namespace) -> int:
    """
    Profile the same steps on all chosen ranks of a running session with torch's profiler, or show an earlier
    profile.
    """
    from traceml_ray.launchers import control
    from traceml_ray.reports.profiles import render_list, render_profile
    from traceml_ray.store.profiles import FOLDER, listed

    if (wrong := _contradiction(arguments)) is not None:
        log(wrong)
        return 2
    shows = _views(arguments)
    if shows:
        from traceml_ray.commands import profile_views

        if not _records(arguments):
            return profile_views.run(lambda: which.folder_of(arguments), arguments)
    folder = which.folder_of(arguments)
    if arguments.list:
        show(render_list(listed(folder), folder / FOLDER), end="")
        return 0
    if arguments.remove:
        return _remove(folder, arguments.remove)
    try:
        given = {name: getattr(arguments, name) for name in wire.ProfileRequest.__struct_fields__}
        wanted = wire.ProfileRequest.checked(
            {name: value for name, value in given.items() if value is not None}
        )
    except ValueError as error:
        log(error)
        return 2
    try:
        with text.progress_bar("profile"):
            result = control.profile(folder, wanted)
    except control.ControlError as error:
        log(error)
        return 1
    # What is shown of it may be one document (--json).
    show(render_profile(result.profile, result.path), end="", file=sys.stderr if shows else None)
    if not result.profile.captured:
        return 1
    return profile_views.show_stored(result, arguments) if shows else 0


def _remove(folder: Path, name: str) -> int:
    from traceml_ray.store.profiles import listed, remove_profile

    if remove_profile(folder, name):
        return 0
    profile_ids = text.listed([info.profile.id for info in listed(folder).done[-5:]]) or "none"
    log(f"no profile {name!r} in {folder}; there: {profile_ids}")
    return 2


def layers_options(command: argparse.ArgumentParser) -> None:
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


def layers(arguments: argparse.Namespace) -> int:
    """Show the time of each layer of the model, and which layer is slower on one rank."""
    from traceml_ray.document.json import as_json
    from traceml_ray.launchers.control import ControlError, check_goes_on, request
    from traceml_ray.signals.layers.view import GetLayers, render_layers
    from traceml_ray.store import session
    from traceml_ray.views.layer_call import measured as await_layers

    folder, answers = which.stored(arguments)
    asked = secrets.token_hex(8)
    try:
        if arguments.steps is None:
            measured = answers.answer(GetLayers(arguments.run))
        else:
            wanted = wire.LayersRequest.checked(arguments.steps, arguments.run)
            check_goes_on(folder, arguments.run)
            request(
                folder,
                wire.ControlRequest(codec.VERSION, asked, wire.MeasureRequest(asked, layers=wanted)),
                _LAYERS_LIMIT_S,
            )
            with text.progress_bar("layers"):
                measured = await_layers(
                    answers.answer,
                    asked,
                    arguments.run,
                    _LAYERS_LIMIT_S,
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
        show(as_json(measured), end="")
    elif measured.ranks:
        show(render_layers(measured), end="")
    else:
        log(_nothing(folder, arguments.steps))
    return 0 if measured.ranks else 1


def _nothing(folder: Path, steps: int | None) -> str:
    name = folder.name
    if steps is not None:
        reason = "`traceml-ray status` may give the reason"
        return f"no rank of session {name!r} has measured its layers; {reason}"
    return (
        f"no layer was measured in session {name!r}; start the job with --deep, or ask for some steps with "
        "--steps while it runs"
    )
