"""Every setting in one struct: keyword > environment `TRACEML_*` > default."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import msgspec

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.wire.codec import ready

P = ParamSpec("P")
R = TypeVar("R")


class SettingError(ValueError):
    """A setting that cannot be used; the message names it, its value, its source and what it may be."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """
    The settings of one session. Every field can be given as a keyword, or in the environment as
    `TRACEML_` + its name in capitals (`TRACEML_OUT`, `TRACEML_INTERVAL`, …).
    """

    session: str | None = None
    """Name of the session: letters, digits, `.`, `_`, `-`; at most 64 characters. None: a new name."""
    out: str = "traceml-sessions"
    """Folder that holds session folders."""
    interval: float = 0.5
    """Seconds between two batches of a rank's agent (0.05 … 60); in jobs of over 256 ranks, twice that."""
    channel: str = "auto"
    """Channel from ranks to the relay: auto, socket or actor."""
    ray_address: str | None = None
    """Address host:port of a running Ray cluster; None: a private one, or that of the driver."""
    socket: str | None = None
    """Path of the relay's local socket (set by the launcher, not by people)."""
    spool: str | None = None
    """Folder in which an agent leaves rows that may not be stored when its process ends."""
    ring_rows: int = 4096
    """Rows the training thread may be ahead of the agent; further rows are dropped and counted."""
    agent_buffer_bytes: int = 1 << 20
    """Largest size of an agent's unconfirmed batches, in bytes; beyond, the oldest is dropped and counted."""
    relay_buffer_bytes: int = 64 << 20
    """Largest size of a relay's unconfirmed packets, in bytes; beyond, the oldest is dropped and counted."""
    session_bytes: int = 1 << 30
    """Size of the session file, in bytes, beyond which its oldest rows are kept only as statistics."""
    bundles: int = 10
    """Newest bundles kept per session; 0 disables bundles."""
    bundle_bytes: int = 1 << 29
    """Largest size of all bundles of a session together, in bytes."""
    bundle_minutes: float = 5.0
    """Minutes of each rank before the incident that a bundle holds (0.1 … 60)."""
    profile_bytes: int = 1 << 30
    """Largest size of all profiles of a session together, in bytes; the oldest are removed."""
    auto_profile: int = 3
    """Number of profiles per run that lasting verdicts may start; 0: none."""
    auto_profile_minutes: float = 30.0
    """Least number of minutes between two of these profiles."""
    output_lines: int = 40
    """Number of last lines of each rank's stdout and stderr that are kept (0 … 200); 0: none are read."""
    idle_ttl: float = 600.0
    """Seconds without any message after which relay and aggregator end."""
    device_clock: str = "auto"
    """
    Whether stages of CUDA jobs are timed by the device's clock: 0 (never), 1 (always) or auto (where steps
    take 40 ms or more).
    """
    memory_history: bool = False
    """
    Have torch record the stack of each allocation on a CUDA device; the record is written when memory runs
    out, in the format of PyTorch's memory viewer. Each allocation then costs time on the training thread.
    """
    deep: bool = False
    """
    Measure the time and memory of each layer of the model, in as many steps as cost at most 3 % of a step;
    the other steps are as without.
    """
    flops: bool = False
    """
    Count the model FLOPs of a step once, by torch's FlopCounterMode: the third step then takes longer.
    """
    model_flops: float | None = None
    """Model FLOPs of a step of all ranks together, if known; then nothing is counted."""
    peak_tflops: float | None = None
    """Peak of one device in 10¹² FLOPs a second; default: its maker's figure, if known."""
    total_steps: int | None = None
    """Number of steps of the job."""
    nice: int = 10
    """How much the priority of the monitor's own Ray is lowered below the launcher's (0 … 19)."""
    debug: bool = False
    """Raise errors that would be swallowed and counted."""
    baseline: str | None = None
    """Name or path of a stored session of a good run: what steps are expected to cost."""
    thresholds: Thresholds = Thresholds()
    """In the environment `TRACEML_THRESHOLD_` + the threshold's name in capitals."""

    @classmethod
    def load(
        cls,
        environ: Mapping[str, str] = os.environ,
        *,
        thresholds: Thresholds | Mapping[str, object] | None = None,
        **keywords: object,
    ) -> Settings:
        """
        Return the settings as keyword, else environment, else default has them.

        A keyword that is None and a variable that is empty count as not given. The constructor
        itself checks nothing.

        Raises:
            SettingError: an unknown name, a value of the wrong type, or one out of its range.
        """
        if isinstance(thresholds, Thresholds):
            thresholds = msgspec.structs.asdict(thresholds)
        chosen = _choose(Thresholds, _THRESHOLD, environ, thresholds or {})
        return cls(**_choose(cls, "TRACEML_", environ, keywords), thresholds=Thresholds(**chosen))

    def changed(self) -> dict[str, str]:
        """Return the settings that are not as by default; not where a session is and how it is reached."""

        def flat(settings: Settings) -> dict[str, Any]:
            values = msgspec.structs.asdict(settings)
            limits = msgspec.structs.asdict(values.pop("thresholds"))
            return values | {f"threshold_{name}": value for name, value in limits.items()}

        usual, left_out = flat(Settings()), OF_LAUNCHERS | {"session", "out"}
        return {
            name: str(value)
            for name, value in flat(self).items()
            if name not in left_out and value != usual[name]
        }


OF_LAUNCHERS = frozenset({"channel", "ray_address", "socket", "spool", "nice"})
"""
Settings that mean something only where a launcher starts the ranks. All others are keywords of `start` and
`TraceMLTrainCallback`, each with its type; a test compares them.
"""


def given(arguments: Mapping[str, object]) -> dict[str, Any]:
    """Return those of a function's arguments (its `locals()`) that are settings and not None."""
    names = Settings.__struct_fields__
    return {name: value for name, value in arguments.items() if name in names and value is not None}


def known_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Have `function` raise a SettingError for an unknown keyword, which names those that it has."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names:
                raise SettingError(f"{name} is not a keyword here; these are: {', '.join(names)}")
        return function(*args, **kwargs)

    return call


_THRESHOLD = "TRACEML_THRESHOLD_"
_CHOICES = {"channel": ("auto", "socket", "actor"), "device_clock": ("0", "1", "auto")}
_SESSION_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")

_RANGES: dict[str, tuple[float, float]] = {
    "interval": (0.05, 60),
    "ring_rows": (64, 1 << 20),
    "agent_buffer_bytes": (1 << 16, 1 << 30),
    "relay_buffer_bytes": (1 << 20, 1 << 36),
    "session_bytes": (1 << 20, 1 << 44),
    "bundles": (0, 1000),
    "bundle_bytes": (1 << 20, 1 << 44),
    "bundle_minutes": (0.1, 60),
    "profile_bytes": (1 << 20, 1 << 44),
    "auto_profile": (0, 100),
    "auto_profile_minutes": (0.1, 1440),
    "output_lines": (0, 200),
    "idle_ttl": (1, 30 * 86_400),
    "model_flops": (1, 1e27),
    "peak_tflops": (0.0001, 1e6),
    "total_steps": (1, 10**15),
    "nice": (0, 19),
    "window_steps": (2, 10_000),
    "first_window_steps": (2, 10_000),
    "warmup_steps": (0, 1_000_000),
    "report_timeout_s": (0.1, 3600),
    "hang_timeout_s": (0.1, 86_400),
    "hang_steps": (1, 1_000_000),
    "baseline_after_steps": (0, 1_000_000),
    "baseline_windows": (2, 1000),
    "drift_mads": (0, 100),
    "drift_errors": (0, 100),
    "hold_s": (0, 3600),
    "hold_group_s": (0, 3600),
    "hold_steps": (0, 1_000_000),
    "hold_cost_s": (0, 3600),
    "hold_share": (0.01, 1),
}
_DEFAULT_RANGES: dict[type, tuple[float, float]] = {int: (1, (1 << 63) - 1), float: (0, 1)}


def check_session_name(name: str, where: str = "session") -> str:
    """Return `name` if a session can be called so (it names a folder, too), or raise SettingError."""
    if not _SESSION_NAME.fullmatch(name):
        raise SettingError(
            f"{where}={name!r} must be 1 to 64 letters, digits, '.', '_' or '-', and not begin with '.'"
        )
    return name


def _choose(
    kind: type[msgspec.Struct], prefix: str, environ: Mapping[str, str], keywords: Mapping[str, object]
) -> dict[str, Any]:
    fields = {field.name: field.type for field in msgspec.structs.fields(kind) if field.name != "thresholds"}
    named = {name: name for name in keywords}
    if prefix == _THRESHOLD:  # all names under it are ours, so one that is not known is a slip
        named |= {key[len(prefix) :].lower(): key for key in environ if key.startswith(prefix)}
    for name, where in named.items():
        if name not in fields:
            raise SettingError(f"{where} is not a setting; these are: {', '.join(fields)}")
    chosen = {}
    for name, expected in fields.items():
        where, value = name, keywords.get(name)
        if value is None:
            where = prefix + name.upper()
            value = environ.get(where) or None
        if value is not None:
            chosen[name] = _check(name, where, value, expected)
    return chosen


def _check(name: str, where: str, value: object, expected: Any) -> object:
    low, high = _RANGES.get(name) or _DEFAULT_RANGES.get(expected) or (None, None)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    try:
        result = msgspec.convert(value, ready(expected), strict=False)
        str(result).encode()  # it is handed to other processes as JSON
    except (msgspec.ValidationError, UnicodeError):
        result = None
    if name == "session" and isinstance(result, str):
        return check_session_name(result, where)
    if low is not None:
        valid = result is not None and low <= result <= high
        allowed = f"{'an integer' if expected is int else 'a number'} from {low} to {high}"
    elif name in _CHOICES:
        *others, last = _CHOICES[name]
        valid, allowed = result in _CHOICES[name], f"{', '.join(others)} or {last}"
    else:
        valid, allowed = result is not None, "true or false" if expected is bool else "text"
    if not valid:
        raise SettingError(f"{where}={value!r} must be {allowed}")
    return result
