"""
The settings of a session, in one struct. A field is a complete setting: its type gives the allowed values,
its docstring is its help. `Settings.load` and the launchers read both here.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from traceml_ray.analysis.thresholds import Bounds, Thresholds
from traceml_ray.wire.codec import ready


class SettingError(ValueError):
    """A setting that cannot be used. The message names it, its value, its source and the allowed values."""


@dataclass(frozen=True)
class Text:
    """Part of a setting's type: its text must match `pattern`; `allowed` describes the pattern in words."""

    pattern: str
    allowed: str


@dataclass(frozen=True)
class Flag:
    """Part of a setting's type: another name for the launcher's flag."""

    name: str


OF_LAUNCHERS = "of launchers"
"""Part of a setting's type: the setting has a meaning only if a launcher starts Ray and the ranks."""
OF_RANKS = "of ranks"
"""Part of a setting's type: a launcher passes the setting to its ranks in their environment."""

_SESSION_NAME = Text(
    r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}",
    "1 to 64 letters, digits, '.', '_' or '-', and not begin with '.'",
)
_ONE_TRACKER = "(auto|wandb|mlflow|tensorboard|comet|aim)"
_TRACKERS = Text(
    f"{_ONE_TRACKER}(,{_ONE_TRACKER})*",
    "auto, wandb, mlflow, tensorboard, comet, aim, or several of them with commas",
)
_ADDRESS = Text(r"[^\s/]+:\d{1,5}", "host:port, of the cluster's GCS")

SHORTEST_STEP_NS = 40_000_000
"""
Shortest step (ns) for which `device_clock=auto` reads the device. On one machine with an H200, the events of
a step cost a host that never waits 60 to 130 µs (`benchmarks/gpu.py`): 0.3 % of such a step.
"""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """
    The settings of one session.

    Each field is a keyword of `traceml_ray.start` and `TraceMLTrainCallback`, a flag of the launchers
    (`--ring-rows`), and a variable in the environment: `TRACEML_` and its name in capitals
    (`TRACEML_RING_ROWS`). A keyword or flag overrides a field of a `Settings` that is given, which overrides
    the environment, which overrides the default. A field that has its default value, a keyword that is None
    and a variable that is empty count as not given.

    The constructor checks nothing; functions that take settings do.
    """

    session: Annotated[str | None, _SESSION_NAME, OF_RANKS] = None
    """
    Name of the session. By default a launcher makes a new name, and a session in a cluster of Ray is called
    `default`. Sessions of different names on one cluster are independent.
    """
    out: Annotated[str, Flag("--sessions")] = "traceml-sessions"
    """
    Folder that holds session folders. A driver outside of the cluster: a folder on the head, below its home.
    """
    interval: Annotated[float, Bounds(0.05, 60), OF_RANKS] = 0.5
    """Seconds between two batches of a rank's agent. In jobs of over 256 ranks it is twice as long."""
    channel: Annotated[Literal["auto", "socket", "actor"], OF_LAUNCHERS, OF_RANKS] = "auto"
    """Channel from ranks to the relay of their node."""
    ray_address: Annotated[str | None, _ADDRESS, OF_LAUNCHERS] = None
    """Address of a running Ray cluster (`host:port`). Default: RAY_ADDRESS, else a private Ray."""
    ring_rows: Annotated[int, Bounds(64, 1 << 20), OF_RANKS] = 4096
    """Rows the training thread may be ahead of the agent; further rows are dropped and counted."""
    agent_buffer_bytes: Annotated[int, Bounds(1 << 16, 1 << 30), OF_RANKS] = 1 << 20
    """Largest size of an agent's unconfirmed batches, in bytes; beyond, the oldest is dropped and counted."""
    relay_buffer_bytes: Annotated[int, Bounds(1 << 20, 1 << 36)] = 64 << 20
    """Largest size of a relay's unconfirmed packets, in bytes; beyond, the oldest is dropped and counted."""
    session_bytes: Annotated[int, Bounds(1 << 20, 1 << 44)] = 1 << 30
    """Size of the session file, in bytes, beyond which its oldest rows are kept only as statistics."""
    bundles: Annotated[int, Bounds(0, 1000)] = 10
    """Newest bundles kept per session; 0 disables bundles."""
    bundle_bytes: Annotated[int, Bounds(1 << 20, 1 << 44)] = 1 << 29
    """Largest size of all bundles of a session together, in bytes."""
    bundle_minutes: Annotated[float, Bounds(0.1, 60)] = 5.0
    """Minutes of each rank before the incident that a bundle holds."""
    profile_bytes: Annotated[int, Bounds(1 << 20, 1 << 44)] = 1 << 30
    """Largest size of all profiles of a session together, in bytes; the oldest are removed."""
    auto_profile: Annotated[int, Bounds(0, 100)] = 3
    """Number of profiles per run that lasting verdicts may start; 0: none."""
    auto_profile_minutes: Annotated[float, Bounds(0.1, 1440)] = 30.0
    """Least number of minutes between two of these profiles."""
    output_lines: Annotated[int, Bounds(0, 200), OF_RANKS] = 40
    """Number of last lines of each rank's stdout and stderr that are kept. 0: none are read."""
    idle_ttl: Annotated[float, Bounds(1, 30 * 86_400)] = 600.0
    """Seconds without any message after which relay and aggregator end."""
    device_clock: Annotated[Literal["0", "1", "auto"], OF_RANKS] = "auto"
    """
    Whether stages of CUDA jobs are timed by the device's clock: 0 (never), 1 (always) or auto (where steps
    take 40 ms or more).
    """
    memory_history: Annotated[bool, OF_RANKS] = False
    """
    Have torch record the stack of each allocation on a CUDA device; the record is written when memory runs
    out, in the format of PyTorch's memory viewer. Each allocation then costs time on the training thread.
    """
    deep: Annotated[bool, OF_RANKS] = False
    """
    Measure the time and memory of each layer of the model, in as many steps as cost at most 3 % of a step;
    the other steps are as without.
    """
    flops: Annotated[bool, OF_RANKS] = False
    """
    Count the model FLOPs of a step once, by torch's FlopCounterMode: the third step then takes longer.
    """
    model_flops: Annotated[float | None, Bounds(1, 1e27), OF_RANKS] = None
    """Model FLOPs of a step of all ranks together, if known; then nothing is counted."""
    peak_tflops: Annotated[float | None, Bounds(0.0001, 1e6), OF_RANKS] = None
    """Peak of one device in 10¹² FLOPs a second; default: its maker's figure, if known."""
    total_steps: Annotated[int | None, Bounds(1, 10**15), OF_RANKS] = None
    """Number of steps of the job."""
    confirm: Literal["off", "restart", "during"] = "off"
    """
    When a check of the nodes tests whether a straggler's machine is slow: never (`off`); when torchrun or Ray
    Train restarts the ranks (`restart`), so the restart takes longer by about twice the seconds of the check;
    or during training (`during`), by measurements that take nothing from the job.
    """
    gpu_hour_price: Annotated[float | None, Bounds(0.0001, 1e6)] = None
    """
    Price of an hour of one GPU, in any currency: then the goodput of a run also has its cost. Ranks without a
    GPU have none.
    """
    metrics_port: Annotated[int | None, Bounds(0, 65535)] = None
    """
    Port at which metrics are served for Prometheus (`/metrics`), on the node of the aggregator, without the
    web app. 0: a free port, which `traceml-ray status` shows. By default they are not served.
    """
    metrics_host: str = "127.0.0.1"
    """
    Address at which the metrics are served. At any other address everyone who reaches it can read them,
    unless TRACEML_METRICS_TOKEN contains a token, which each scrape must then send.
    """
    metrics_ranks: Annotated[int, Bounds(1, 1 << 20)] = 1024
    """Largest number of ranks with metrics each. Above it only nodes and the slowest rank have metrics."""
    alerts: str | None = None
    """
    Path of the file of alerts (TOML): which findings are sent where. It is read where the session is
    started. Instead of the path, its text can be given (with a line break).
    """
    ray_metrics: bool = False
    """Add some metrics of the run to Ray's own, which Ray serves for Prometheus (`ray_traceml_…`)."""
    kubeflow: bool = False
    """
    Post progress, time left and some metrics to Kubeflow Trainer, as the status of the TrainJob whose pods
    train.
    """
    otel: bool = False
    """
    Send metrics and traces by OpenTelemetry. The standard variables say where to and how
    (`OTEL_EXPORTER_OTLP_ENDPOINT`, …).
    """
    log_to: Annotated[str | None, _TRACKERS, OF_RANKS] = None
    """
    Experiment trackers whose run, opened by the script in rank 0, also gets the figures of the session:
    `wandb`, `mlflow`, `tensorboard`, `comet`, `aim`, several with commas, or `auto` for every one that the
    script has open.
    """
    nice: Annotated[int, Bounds(0, 19), OF_LAUNCHERS] = 10
    """How much the priority of the monitor's own Ray is lowered below the launcher's."""
    debug: bool = False
    """Raise, or print, errors that would be swallowed and counted."""
    baseline: str | None = None
    """Name or path of a stored session of a good run: what steps are expected to cost."""
    thresholds: Thresholds = Thresholds()
    """
    Limits of the verdict: a `Thresholds`, or names and values. In the environment each is a variable of its
    own: `TRACEML_THRESHOLD_` and its name in capitals.
    """

    @classmethod
    def load(
        cls,
        environ: Mapping[str, str] = os.environ,
        settings: Settings | None = None,
        written: Callable[[str], str] = str,
        /,
        **fields: object,
    ) -> Settings:
        """
        Return the settings as `fields`, else `settings`, else the environment, else the defaults have them.

        Args:
            environ: the environment.
            settings: fields that have their default value count as not given.
            written: returns what the source of `fields` calls a setting, for errors.
            fields: settings by name; None counts as not given. `thresholds` has all limits (a struct) or
                some (a mapping).

        Raises:
            SettingError: an unknown name, a value of the wrong type, or one out of its range.
        """
        given = of_settings(settings)
        limits = {**_limits(given.pop("thresholds", {}), "thresholds")}
        of_keyword = fields.pop("thresholds", None)
        if isinstance(of_keyword, Thresholds):
            of_keyword = msgspec.structs.asdict(of_keyword)
        limits |= _limits(of_keyword, written("thresholds"))
        chosen = _choose(cls, "TRACEML_", environ, {**given, **_not_none(fields)}, written)
        thresholds = _choose(Thresholds, _THRESHOLD, environ, limits, str)
        return cls(**chosen, thresholds=Thresholds(**thresholds))

    def changed(self) -> dict[str, str]:
        """
        Return the settings that differ from the defaults, except those that say where a session is and how it
        is reached, and the text of alerts, which may hold secrets.
        """
        left_out = {setting.name for setting in table(Settings).values() if setting.of_launchers}
        given = of_settings(self)
        limits = given.pop("thresholds", {})
        values = {
            name: value
            for name, value in given.items()
            if name not in left_out | {"session", "out", "alerts"}
        }
        values |= {f"threshold_{name}": value for name, value in limits.items()}
        return {name: str(value) for name, value in values.items()}


class RelayPaths(msgspec.Struct, frozen=True):
    """Paths of the relay of a rank. A launcher passes them to its ranks; they are not settings for people."""

    socket: str | None = None
    """Path of the relay's local socket."""
    spool: str | None = None
    """Folder in which an agent leaves rows that may not have been stored when its process ended."""

    @classmethod
    def load(cls, environ: Mapping[str, str] = os.environ) -> RelayPaths:
        """Return the paths in the environment `environ`."""
        return cls(*(environ.get(f"TRACEML_{name.upper()}") or None for name in cls.__struct_fields__))


@dataclass(frozen=True)
class Setting:
    """One field of `Settings` or `Thresholds`."""

    name: str
    type: Any
    """Type of the value, without None and without the annotations."""
    default: Any
    range: Bounds | None = None
    text: Text | None = None
    flags: tuple[str, ...] = ()
    """Flags of the launcher for the setting, the usual one first."""
    of_launchers: bool = False
    of_ranks: bool = False

    @property
    def choices(self) -> tuple[str, ...]:
        """All allowed values; () if the allowed values are not a list."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def allowed(self) -> str:
        """Text that describes the allowed values."""
        if self.range is not None:
            number = "an integer" if self.type is int else "a number"
            return f"{number} from {self.range.low} to {self.range.high}"
        if self.choices:
            *others, last = self.choices
            return f"{', '.join(others)} or {last}"
        if self.text is not None:
            return self.text.allowed
        return "true or false" if self.type is bool else "text"

    def checked(self, value: object, where: str) -> Any:
        """
        Return `value` converted to the setting's type. `where` names its source in errors. Raises
        SettingError.
        """
        given = os.fspath(value) if isinstance(value, os.PathLike) else value
        try:
            result = msgspec.convert(given, ready(self.type), strict=False)
            str(result).encode()  # it is handed to other processes as JSON
        except (msgspec.ValidationError, UnicodeError):
            result = None
        valid = result is not None
        if valid and self.range is not None:
            valid = self.range.low <= result <= self.range.high
        if valid and self.text is not None:
            valid = re.fullmatch(self.text.pattern, result) is not None
        if not valid:
            raise SettingError(f"{where}={given!r} must be {self.allowed}")
        return result


@functools.cache
def table(kind: type[Settings | Thresholds]) -> dict[str, Setting]:
    """Return the settings of a struct by name, except `thresholds`, which is a struct itself."""
    fields = msgspec.structs.fields(kind)
    return {field.name: _setting(field) for field in fields if field.name != "thresholds"}


def _setting(field: msgspec.structs.FieldInfo) -> Setting:
    annotated = get_origin(field.type) is Annotated
    whole, *notes = get_args(field.type) if annotated else (field.type,)
    kinds = [kind for kind in get_args(whole) if kind is not type(None)]
    kind = kinds[0] if type(None) in get_args(whole) else whole
    flags = [note.name for note in notes if isinstance(note, Flag)]
    return Setting(
        field.name,
        kind,
        field.default,
        next((note for note in notes if isinstance(note, Bounds)), _DEFAULT_RANGES.get(kind)),
        next((note for note in notes if isinstance(note, Text)), None),
        (*flags, f"--{field.name.replace('_', '-')}"),
        OF_LAUNCHERS in notes,
        OF_RANKS in notes,
    )


@functools.cache
def help_of(kind: type[Settings]) -> dict[str, str]:
    """Return the docstring of each field as one line; empty if the source files are not installed."""
    try:
        (struct,) = ast.parse(inspect.getsource(kind)).body
    except (OSError, SyntaxError):
        return {}
    body = struct.body if isinstance(struct, ast.ClassDef) else []
    texts = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            texts[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(below.value)).split())
    return texts


def of_settings(settings: Settings | None) -> dict[str, Any]:
    """
    Return the fields that differ from the defaults; of `thresholds`, the limits that differ. Raises
    SettingError if `settings` is not a `Settings`.
    """
    if settings is None:
        return {}
    if not isinstance(settings, Settings):
        raise SettingError(f"settings={settings!r} must be Settings; a session is named by session=NAME")
    given = {name: getattr(settings, name) for name in Settings.__struct_fields__}
    given["thresholds"] = _limits(given["thresholds"], "thresholds")
    usual = {name: setting.default for name, setting in table(Settings).items()} | {"thresholds": {}}
    return {name: value for name, value in given.items() if value != usual[name]}


def of_driver(settings: Settings | None, fields: Mapping[str, object]) -> dict[str, Any]:
    """
    Return the settings that a driver of Ray has given, checked, by name. `fields` override `settings`.

    Raises SettingError also for a setting that only launchers accept.
    """
    names = _not_none(fields).keys() | of_settings(settings).keys()
    for setting in table(Settings).values():
        if setting.of_launchers and setting.name in names:
            raise SettingError(
                f"{setting.name} is a setting of launchers: a driver uses the Ray that it is connected to"
            )
    loaded = Settings.load(os.environ, settings, **fields)
    return {name: getattr(loaded, name) for name in loaded.__struct_fields__ if name in names}


def check_session_name(name: str) -> str:
    """Return `name` if it is a valid name of a session, and so of a folder; else raise SettingError."""
    return str(table(Settings)["session"].checked(name, "session"))


_THRESHOLD = "TRACEML_THRESHOLD_"
_DEFAULT_RANGES = {int: Bounds(1, (1 << 63) - 1), float: Bounds(0, 1)}


def _not_none(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def _limits(thresholds: object, where: str) -> dict[str, object]:
    """Return thresholds by name. Of a struct, only those that differ from the defaults."""
    if isinstance(thresholds, Thresholds):
        usual = Thresholds()
        changed = {name: getattr(thresholds, name) for name in thresholds.__struct_fields__}
        return {name: value for name, value in changed.items() if value != getattr(usual, name)}
    if not isinstance(thresholds, Mapping | None):
        raise SettingError(f"{where}={thresholds!r} must be Thresholds, or names and values")
    return _not_none(thresholds or {})


def _choose(
    kind: type[Settings | Thresholds],
    prefix: str,
    environ: Mapping[str, str],
    given: Mapping[str, object],
    written: Callable[[str], str],
) -> dict[str, Any]:
    """Return the values of the settings that are given, or set in the environment."""
    settings = table(kind)
    for name, where in _names(prefix, environ, given):
        if name not in settings:
            names = kind.__struct_fields__
            meant = "".join(f"did you mean {one}? " for one in difflib.get_close_matches(name, names, 1))
            raise SettingError(f"{where} is not a setting; {meant}these are: {', '.join(names)}")
    chosen = {}
    for name, setting in settings.items():
        variable = prefix + name.upper()
        if name in given:
            chosen[name] = setting.checked(given[name], written(name))
        elif environ.get(variable):
            chosen[name] = setting.checked(environ[variable], variable)
    return chosen


def _names(prefix: str, environ: Mapping[str, str], given: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the name of each setting, and how it was written."""
    yield from ((name, name) for name in given)
    if prefix == _THRESHOLD:  # all names under it are ours, so one that is not known is a slip
        yield from ((key[len(prefix) :].lower(), key) for key in environ if key.startswith(prefix))
