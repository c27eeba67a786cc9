"""The command `alerts`: checks a file of alerts, and sends a test alert to each destination."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

from traceml_ray import text
from traceml_ray.settings import Settings
from traceml_ray.text import log, show

if TYPE_CHECKING:
    from traceml_ray.sinks.alerts.config import Config, Rule


def alerts_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `traceml-ray alerts`."""
    command.add_argument(
        "action",
        choices=("test", "check"),
        help="test: send a test alert; check: read the file, send nothing",
    )
    command.add_argument(
        "file", nargs="?", metavar="FILE", help="file of alerts (default: TRACEML_ALERTS, see the docs)"
    )


def alerts(arguments: argparse.Namespace) -> int:
    """Check a file of alerts, or send a test alert to each of its destinations and say what arrived."""
    from traceml_ray.sinks.alerts.config import parse, read_alerts

    settings = read_alerts(Settings.load(alerts=arguments.file), os.environ)
    if settings.alerts is None:
        log("alerts: there is no file of alerts: name one, or set TRACEML_ALERTS")
        return 2
    config = parse(settings.alerts)
    return _check(config) if arguments.action == "check" else _test(config)


def _check(config: Config) -> int:
    """Say what the file says."""
    from traceml_ray.sinks.alerts.config import variables

    for number, rule in enumerate(config.rules, 1):
        show(f"rule {number}: {_rule_text(rule)}")
    for destination in config.destinations:
        missing = [name for name in variables(destination.place) if not os.environ.get(name)]
        note = f" ({text.listed(missing)}: not set here)" if missing else ""
        show(f"{destination.name}: {destination.kind}{note}")
    return 0


def _rule_text(rule: Rule) -> str:
    what = ", ".join(rule.labels) or "all labels"
    cost = f", cost at least {text.percent(rule.cost)}" if rule.cost else ""
    lasts = f" for {text.duration(rule.for_s)}" if rule.for_s else ""
    gone = f"resolved after {text.duration(rule.resolve_after_s)}"
    to = text.listed(list(rule.to)) or "all destinations"
    return f"{what}, at least {rule.severity}{cost}{lasts}; {gone}; to {to}"


def _test(config: Config) -> int:
    """Send a test alert to each destination, one after the other."""
    from traceml_ray.sinks.alerts.config import AlertFileError, resolved
    from traceml_ray.sinks.alerts.send import SendError, send, where_of
    from traceml_ray.sinks.alerts.trial import trial

    failed = 0
    for destination in config.destinations:
        name, began = f"{destination.name} ({destination.kind})", time.monotonic()
        try:
            place, secrets = resolved(destination.place, os.environ)
            name = f"{destination.name} ({destination.kind} {where_of(place)})"
            send(place, trial(destination.name, config.link, time.time_ns()), secrets)
        except (AlertFileError, SendError) as error:
            failed += 1
            show(f"{name}: failed: {error}")
        else:
            took_s = time.monotonic() - began
            show(f"{name}: arrived in {text.ms(1e3 * took_s) if took_s < 1 else text.duration(took_s)}")
    return 1 if failed else 0
