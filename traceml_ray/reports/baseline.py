"""The setting `baseline`: a stored session of a good run. Its steps give the expected cost of a step."""

from __future__ import annotations

from pathlib import Path

import msgspec

from traceml_ray.analysis.baseline import Baseline
from traceml_ray.reports.summary import baseline_of
from traceml_ray.settings import SettingError, Settings
from traceml_ray.store.schema import SessionFileError, legible
from traceml_ray.store.session import DATABASE, SessionError, find
from traceml_ray.store.session_file import SessionFile


def checked(settings: Settings) -> Settings:
    """
    Return the settings with `baseline` as an absolute path, for another process to read.

    Raises SettingError if it names no session that can give a baseline.
    """
    if settings.baseline is None:
        return settings
    folder = _folder(settings)
    if settings.session and folder == (_out(settings) / settings.session).absolute():
        raise SettingError(
            f"baseline={settings.baseline!r} is also the name of the new session, which would move it aside: "
            "choose another name for the new session"
        )
    given(settings)
    return msgspec.structs.replace(settings, baseline=str(folder))


def given(settings: Settings) -> Baseline | None:
    """Return the baseline that the settings name; None if they name none. Raises SettingError."""
    if settings.baseline is None:
        return None
    folder = _folder(settings)
    try:
        with SessionFile(folder / DATABASE) as session, legible(folder / DATABASE):
            baseline = baseline_of(session, settings.thresholds)
    except SessionFileError as error:
        raise SettingError(f"baseline={settings.baseline!r}: {error}") from None
    if baseline is None:
        limits = settings.thresholds
        steps = (
            limits.warmup_steps + limits.baseline_after_steps + limits.baseline_windows * limits.window_steps
        )
        raise SettingError(
            f"baseline={settings.baseline!r} has too few healthy steps to be a baseline: all ranks must have "
            f"reported, and it takes about {steps} steps"
        )
    return msgspec.structs.replace(baseline.elsewhere(f"session {folder.name}"), ranks=None)


def _out(settings: Settings) -> Path:
    return Path(settings.out).expanduser()


def _folder(settings: Settings) -> Path:
    try:
        return find(settings.baseline, _out(settings)).absolute()
    except SessionError as error:
        raise SettingError(f"baseline={settings.baseline!r}: {error}") from None
