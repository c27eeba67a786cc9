"""
Writes the reference pages of the documentation: python docs/reference_pages.py docs/reference

`commands.md` and `settings.md` are written as a whole. In `formats.md` the part below the marker is written.
The package is imported; torch and Ray are not.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from api_page import meaning_of_docstring, shape, shapes_of, table

from traceml_ray import cli
from traceml_ray.commands.help import EXAMPLES, EXIT_CODES, STARTING
from traceml_ray.exports.tables import TABLES
from traceml_ray.launchers.arguments import add_flags
from traceml_ray.wire import messages
from traceml_ray.wire.codec import Message

MARKER = "<!-- written by `make api` from here on -->\n"
SETTINGS = {
    "traceml_ray/settings.py": ("Settings",),
    "traceml_ray/analysis/thresholds.py": ("Thresholds", "MachineLimits", "CompareLimits"),
}


def commands_page() -> str:
    """Return the page of all commands and their options."""
    parts = ["# Commands\n", f"{STARTING}\n", f"{EXIT_CODES}\n", "This page is written by `make api`.\n"]
    launch = argparse.ArgumentParser(add_help=False)
    add_flags(launch.add_argument, "the master's port + 1")
    launch.add_argument("--no-monitor", action="store_true", help="Run plain torchrun, without the monitor.")
    parts += [
        "## python -m traceml_ray.launch\n",
        "In place of `torchrun`, with all its options and these:\n",
        _options(launch),
    ]
    for name, command in _subcommands().items():
        parts += [f"## traceml-ray {name}\n", f"{command.description}\n", _options(command)]
        parts += ["```text\n" + "\n".join(EXAMPLES[name]) + "\n```\n"] if name in EXAMPLES else []
    return "\n".join(parts)


def settings_page() -> str:
    """Return the page of settings and thresholds."""
    intro = (
        "# Settings and thresholds\n\nA threshold is `start(thresholds={NAME: VALUE})`, the launchers' flag "
        "`--thresholds NAME=VALUE`, or the environment variable `TRACEML_THRESHOLD_` and its name in "
        "capitals.\n\nThis page is written by `make api`.\n"
    )
    shapes = [
        shape(node, default=True).replace("###", "##", 1)
        for path, names in SETTINGS.items()
        for node in shapes_of(path, names)
    ]
    return "\n".join([intro, *shapes])


def formats_page(text: str) -> str:
    """Return the page of formats with its generated part as it is now."""
    exported = [
        f"### {name}\n\n{', '.join(f'`{column}` ({kind})' for column, kind in one.columns.items())}\n"
        for name, one in TABLES.items()
    ]
    rows = [
        (f"`{message.__name__}`", meaning_of_docstring(inspect.getdoc(message) or ""))
        for message in vars(messages).values()
        if inspect.isclass(message) and issubclass(message, Message) and message is not Message
    ]
    parts = [
        text.partition(MARKER)[0] + MARKER,
        "## Tables of an export\n",
        "Columns of `traceml-ray export --format parquet` and `csv`. Text may hold JSON.\n",
        *exported,
        "## Messages\n",
        "msgpack, checked for size, version and type before anything is built.\n",
        table(("message", "content"), rows),
    ]
    return "\n".join(parts)


def _subcommands() -> dict[str, argparse.ArgumentParser]:
    actions = cli._parser()._actions
    (commands,) = (action for action in actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


def _options(parser: argparse.ArgumentParser) -> str:
    rows = list(_rows(parser))
    return table(("argument", "meaning"), rows) if rows else "No options.\n"


def _rows(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        yield f"`{_called(action)}`", _about(action)


def _called(action: argparse.Action) -> str:
    """Return an argument as it is typed: its names, and what stands for its value."""
    value = str(action.metavar or action.dest.upper())
    if action.choices and not action.metavar:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    names = ", ".join(action.option_strings)
    return value if not names else names if action.nargs == 0 else f"{names} {value}"


def _about(action: argparse.Action) -> str:
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    return " ".join(text.split())


def write(folder: Path) -> None:
    """Write the three pages into `folder`."""
    (folder / "commands.md").write_text(commands_page())
    (folder / "settings.md").write_text(settings_page())
    formats = folder / "formats.md"
    formats.write_text(formats_page(formats.read_text()))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
