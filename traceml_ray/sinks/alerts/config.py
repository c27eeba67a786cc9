"""
The file of alerts (TOML): which findings are sent where. It is read where a session is started; variables
(`${NAME}`) and files of secrets are read where the alerts are sent from.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec
from msgspec.structs import fields, replace

from traceml_ray.analysis.labels import LABELS, Severity
from traceml_ray.settings import SettingError, Settings
from traceml_ray.wire.codec import ready

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_BYTES = 1 << 17
"""Largest size of the file, in bytes."""
RUN_FAILED = "run_failed"
"""Label of the alert that a run has failed without a finding that says why."""
_OF_SIGNALS = (
    *("slow_layer", "uneven_shards", "uneven_experts", "node_anomaly", "not_finite", "badput"),
    *("slow_collective", "slow_node", "slow_device", "slow_link"),
)
_OF_MEMORY = (
    *("creep", "fragmentation", "imbalance", "near_limit", "persistent_drift", "step_change"),
    *("transient_spike", "first_cause", "collective_onset"),
    *("collective_confident", "collective_likely", "collective_suspect"),
)
KNOWN = (*LABELS, RUN_FAILED, *_OF_SIGNALS, *(f"memory_{kind}" for kind in _OF_MEMORY))
"""The labels that a rule may name."""
VARIABLES = {"webhook": "TRACEML_ALERT_WEBHOOK", "slack": "TRACEML_ALERT_SLACK"}
"""Variables with the URL of the one destination of a session that has no file of alerts."""
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_DURATIONS = {"for", "resolve_after", "group", "repeat", "timeout", "every"}
"""Keys whose values are a number of seconds, or a text such as "5min"."""
_SECRET_CHARS = 6
"""Shorter parts of a URL are words such as `hooks`."""
T = TypeVar("T")


class AlertFileError(SettingError):
    """A file of alerts that cannot be used. The message names the key and what is allowed."""


class Rule(
    msgspec.Struct, frozen=True, kw_only=True, rename={"for_s": "for", "resolve_after_s": "resolve_after"}
):
    """Which findings are sent where. A finding must meet all conditions of the rule."""

    to: tuple[str, ...] = ()
    """Names of destinations. (): all."""
    labels: tuple[str, ...] = ()
    """Labels, or patterns of labels (`memory_*`). (): all."""
    severity: Severity = "warning"
    """The least severity."""
    cost: float = 0.0
    """Least cost in % of the time. Above 0, a finding whose cost is not known does not meet the rule."""
    for_s: float = 0.0
    """How long a finding must last before it is sent, in s."""
    resolve_after_s: float = 300.0
    """How long it must be gone before it is resolved, in s."""


DEFAULT_RULES = (Rule(severity="critical"), Rule(severity="warning", for_s=60.0))
"""The rules of a file that has none."""


class Pace(msgspec.Struct, frozen=True, kw_only=True, rename={"group_s": "group", "repeat_s": "repeat"}):
    """How often a destination is sent a message."""

    group_s: float = 10.0
    """How long a first alert waits for others, which are then sent in the same message, in s."""
    per_hour: int = 20
    """Largest number of messages in an hour. A message with a critical alert is sent nevertheless."""
    repeat_s: float = 0.0
    """Interval in which alerts that go on are sent again, in s. 0: they are not."""


class Webhook(msgspec.Struct, frozen=True, kw_only=True, rename={"timeout_s": "timeout"}):
    """A URL that is sent each message as JSON."""

    url: str = ""
    url_file: str = ""
    headers: dict[str, str] = {}
    timeout_s: float = 10.0
    """How long one attempt may take, in s."""


class Slack(msgspec.Struct, frozen=True, kw_only=True, rename={"timeout_s": "timeout"}):
    """An incoming webhook of Slack, or of a service that takes the same JSON."""

    url: str = ""
    url_file: str = ""
    timeout_s: float = 10.0


class Alertmanager(
    msgspec.Struct, frozen=True, kw_only=True,
    rename={"timeout_s": "timeout", "every_s": "every"},
):  # fmt: skip
    """An Alertmanager of Prometheus. It groups, limits and routes by itself."""

    url: str = ""
    """Its address, without `/api/v2/alerts`."""
    url_file: str = ""
    headers: dict[str, str] = {}
    labels: dict[str, str] = {}
    """Further labels of each alert."""
    every_s: float = 60.0
    """Interval in which it is told which alerts go on, in s. After five of them it takes them as resolved."""
    timeout_s: float = 10.0


class Email(msgspec.Struct, frozen=True, kw_only=True, rename={"sender": "from", "timeout_s": "timeout"}):
    """An e-mail for each message, by SMTP."""

    host: str
    to: tuple[str, ...]
    sender: str
    port: int | None = None
    """Default: 587; 465 for `ssl`; 25 for `none`."""
    security: Literal["starttls", "ssl", "none"] = "starttls"
    user: str = ""
    password: str = ""
    password_file: str = ""
    timeout_s: float = 20.0


class Program(msgspec.Struct, frozen=True, kw_only=True, rename={"timeout_s": "timeout"}):
    """A program that is started, without a shell, for each message, with the JSON on stdin."""

    argv: tuple[str, ...]
    timeout_s: float = 30.0


Place = Webhook | Slack | Alertmanager | Email | Program
KINDS: dict[str, type[Place]] = {
    "webhook": Webhook, "slack": Slack, "alertmanager": Alertmanager, "email": Email, "command": Program,
}  # fmt: skip


class Destination(msgspec.Struct, frozen=True, kw_only=True):
    """A place that alerts are sent to, by its name in the file."""

    name: str
    pace: Pace
    place: Place

    @property
    def kind(self) -> str:
        """Kind of the place, as the file has it."""
        return next(name for name, kind in KINDS.items() if isinstance(self.place, kind))


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What a file of alerts says."""

    rules: tuple[Rule, ...]
    destinations: tuple[Destination, ...]
    link: str = ""
    """URL of the session's page, in which `{session}` stands for the name of the session. "": none."""


def read_alerts(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """
    Return the settings with the text of the file of alerts in place of its path. Without a file: with a
    text for the variables that name a destination.

    Raises AlertFileError for a file that cannot be read or used.
    """
    given = settings.alerts
    if given is None:
        urls = {kind: environ[name] for kind, name in VARIABLES.items() if environ.get(name)}
        if not urls:
            return settings
        given = "".join(f"[to.{kind}]\nkind = '{kind}'\nurl = {_quoted(url)}\n" for kind, url in urls.items())
    elif "\n" not in given:
        given = text_of(Path(given).expanduser())
    parse(given, "alerts" if settings.alerts is None or "\n" in settings.alerts else settings.alerts)
    return replace(settings, alerts=given)


def text_of(path: Path) -> str:
    """Return the text of a file of alerts; it has a line break. Raises AlertFileError."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise AlertFileError(f"{path}: a file of alerts has at most {MOST_BYTES:,} bytes")
        return data.decode() + "\n"
    except OSError as error:
        raise AlertFileError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise AlertFileError(f"{path}: a file of alerts is UTF-8") from None


def _quoted(value: str) -> str:
    """Return a text in TOML; `$` is not the start of a variable in it."""
    return msgspec.json.encode(value.replace("${", "$${")).decode()


def parse(text: str, name: str = "alerts") -> Config:
    """Return what the text of a file says. `name` names the file in errors. Raises AlertFileError."""
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise AlertFileError(f"{name}: {error}") from None
    _check_keys(name, "", given, ("rule", "to", "link"))
    destinations = [
        _destination(name, key, table) for key, table in _table(name, "to", given.get("to", {})).items()
    ]
    if not destinations:
        raise AlertFileError(f"{name}: it needs a destination, a table such as [to.team]")
    tables = given.get("rule", [])
    if not (isinstance(tables, list) and all(isinstance(table, dict) for table in tables)):
        raise AlertFileError(f"{name}: rule must be tables [[rule]]")
    names = [one.name for one in destinations]
    rules = [_rule(name, f"rule {number}", table, names) for number, table in enumerate(tables, 1)]
    link = _converted(name, "link", given.get("link", ""), str)
    return Config(rules=tuple(rules) or DEFAULT_RULES, destinations=tuple(destinations), link=link)


def _table(name: str, key: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise AlertFileError(f"{name}: {key} must be a table")
    return value


def _destination(name: str, key: str, value: object) -> Destination:
    where = f"to.{key}"
    table = _table(name, where, value)
    kind = KINDS.get(str(table.get("kind")))
    if kind is None:
        raise AlertFileError(f"{name}: {where}.kind must be one of {', '.join(KINDS)}")
    of_pace, of_place = _keys(Pace), _keys(kind)
    _check_keys(name, where, table, ("kind", *of_place, *of_pace))
    pace = _converted(name, where, {k: v for k, v in table.items() if k in of_pace}, Pace)
    place = _converted(name, where, {k: v for k, v in table.items() if k in of_place}, kind)
    if pace.per_hour < 1:
        raise AlertFileError(f"{name}: {where}.per_hour must be at least 1")
    if isinstance(place, Webhook | Slack | Alertmanager) and bool(place.url) == bool(place.url_file):
        raise AlertFileError(f"{name}: {where} needs url or url_file")
    if isinstance(place, Alertmanager):  # it groups and limits by itself
        pace = Pace(group_s=0.0, per_hour=1 << 30, repeat_s=max(1.0, place.every_s))
    if (isinstance(place, Email) and not place.to) or (isinstance(place, Program) and not place.argv):
        raise AlertFileError(
            f"{name}: {where}.{'to' if isinstance(place, Email) else 'argv'} must not be empty"
        )
    return Destination(name=key, pace=pace, place=place)


def _rule(name: str, where: str, table: dict[str, Any], names: Sequence[str]) -> Rule:
    _check_keys(name, where, table, _keys(Rule))
    rule = _converted(name, where, table, Rule)
    for destination in rule.to:
        if destination not in names:
            raise AlertFileError(f"{name}: {where}.to: {_unknown(destination, names)}")
    for label in rule.labels:
        if not any(fnmatchcase(known, label) for known in KNOWN):
            raise AlertFileError(f"{name}: {where}.labels: {_unknown(label, KNOWN)}")
    return rule


def _keys(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(field.encode_name for field in fields(kind))


def _check_keys(name: str, where: str, table: Mapping[str, object], known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            raise AlertFileError(f"{name}: {where + ': ' if where else ''}{_unknown(key, known)}")


def _unknown(given: str, known: Sequence[str]) -> str:
    meant = "".join(f"did you mean {one}? " for one in difflib.get_close_matches(given, known, 1))
    return f"{given!r} is not known; {meant}these are: {', '.join(known)}"


def _converted(name: str, where: str, value: Any, kind: type[T]) -> T:
    if isinstance(value, dict):
        value = {
            key: _seconds(name, f"{where}.{key}", v) if key in _DURATIONS else v for key, v in value.items()
        }
    try:
        return msgspec.convert(value, ready(kind))
    except msgspec.ValidationError as error:
        why, _, path = str(error).partition(" - at `$")
        raise AlertFileError(f"{name}: {where}{path.rstrip('`')}: {why[:1].lower()}{why[1:]}") from None


def _seconds(name: str, where: str, value: object) -> float:
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
        return float(match[1]) * _SECONDS[match[2]]
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9:
        return float(value)
    raise AlertFileError(
        f'{name}: {where} must be a number of seconds, or a text such as "30s", "5min" or "1h"'
    )


def variables(place: Place) -> list[str]:
    """Return the names of the variables in a destination."""
    texts = str(msgspec.to_builtins(place)).replace("$${", "")
    return sorted(set(_VARIABLE.findall(texts)))


def variables_of(settings: Settings) -> list[str]:
    """Return the names of the variables in the file of alerts, whose text is in the settings."""
    given = settings.alerts or ""
    destinations = parse(given).destinations if "\n" in given else ()
    return sorted({name for one in destinations for name in variables(one.place)})


def resolved(place: Place, environ: Mapping[str, str]) -> tuple[Place, tuple[str, ...]]:
    """
    Return a destination with the values of its variables and the contents of its files, and the secrets that
    are in it.

    Raises AlertFileError for a variable that is not set and a file that cannot be read.
    """
    secrets: list[str] = []

    def expand(value: object) -> object:
        if isinstance(value, dict):
            return {key: expand(one) for key, one in value.items()}
        if isinstance(value, tuple | list):
            return [expand(one) for one in value]
        return _expanded(value, environ, secrets) if isinstance(value, str) else value

    table = cast(dict[str, Any], expand(msgspec.to_builtins(place)))
    for key in [key for key in table if key.endswith("_file")]:
        path = table.pop(key)
        if path:
            table[key.removesuffix("_file")] = value = _secret_in(path)
            secrets.append(value)
    secrets += [table[key] for key in ("url", "password") if table.get(key)]
    secrets += _secrets_in(table.get("url", ""))
    secrets += [*table.get("headers", {}).values()]
    return msgspec.convert(table, ready(type(place))), tuple(secrets)


def _secrets_in(url: str) -> list[str]:
    """Return the parts of a URL that may be secret: login, parts of the path, values of the query."""
    rest = url.partition("://")[2]
    login, at_sign, _ = rest.partition("/")[0].rpartition("@")
    parts = re.split(r"[/?&=#]", rest.partition("/")[2]) + (login.split(":") if at_sign else [])
    return [part for part in parts if len(part) >= _SECRET_CHARS]


def _expanded(value: str, environ: Mapping[str, str], secrets: list[str]) -> str:
    def variable(match: re.Match[str]) -> str:
        if match.start() and value[match.start() - 1] == "$":
            return match[0][1:]
        if not environ.get(match[1]):
            raise AlertFileError(f"the variable {match[1]} is not set where the alerts are sent from")
        secrets.append(environ[match[1]])
        return environ[match[1]]

    return _VARIABLE.sub(variable, value)


def _secret_in(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise AlertFileError(f"{path}: {why}") from None
