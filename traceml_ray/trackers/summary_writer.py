"""TensorBoard: a `SummaryWriter` of `torch.utils.tensorboard` or tensorboardX that the script has open."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, NamedTuple

from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.wire.messages import Figures

from .tracker import VERDICT, ImportPatch, TrackerPlace, values_of

_MODULES = ("torch.utils.tensorboard.writer", "tensorboardX.writer")


class _OpenFiles(NamedTuple):
    files: Any
    """The writer's event files."""
    module: str
    """Module of the writer's class, which makes its summaries."""


class SummaryWriter:
    """Figures are scalars, with the step of each. The verdict is a text."""

    name = "tensorboard"

    def __init__(self) -> None:
        self._made: list[tuple[weakref.ref[Any], str]] = []
        """The script's writers in the order in which they were made, and the module of each."""

    def patches(self) -> list[ImportPatch]:
        """Return what is patched to know the script's writers: nothing lists them."""
        return [(module, self.name, functools.partial(self._patch, module)) for module in _MODULES]

    def _patch(self, module: str, patcher: Patcher) -> None:
        note = patcher.after("tensorboard", lambda writer, _: self.note(writer, module))
        patcher.replace(sys.modules[module].SummaryWriter, "__init__", note)

    def note(self, writer: Any, module: str) -> None:
        """Note a writer of the script, of a class of `module`."""
        alive = [made for made in self._made if made[0]() is not None]
        self._made = [*alive, (weakref.ref(writer), module)]

    def open_run(self) -> _OpenFiles | None:
        """Return the files of the first writer that is not closed."""
        for writer, module in self._made:
            # with the writer itself, a figure would open another file if the script has closed it meanwhile
            if (files := getattr(writer(), "file_writer", None)) is not None:
                return _OpenFiles(files, module)
        return None

    def place(self, run: _OpenFiles) -> TrackerPlace:
        """Return the folder of the event files."""
        return TrackerPlace("", str(run.files.get_logdir()), "")

    def write(self, run: _OpenFiles, figures: Figures, changed: bool) -> None:
        """Write figures as scalars; a new verdict as a text."""
        summaries: Any = sys.modules[run.module]
        files = run.files
        for name, value in values_of(figures).items():
            files.add_summary(summaries.scalar(name, value), figures.step)
        if changed:
            files.add_summary(summaries.text(VERDICT, f"{figures.headline}: {figures.why}"), figures.step)
