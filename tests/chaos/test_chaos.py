"""
Whatever happens to the monitor, training does not notice: each case beside the same script without one.

Cases marked long are for `make chaos`. What other tests prove better has no case here: a session on a cluster
that stays, a launcher that is killed or told to end (`test_launch`), Ray Train over nodes that are lost
(`test_membership`), without the package (`test_shipping`) or with one that is broken (`test_ray_train`), the
moment of attaching (`test_attached`), loader workers (`test_agent_process`).
"""

from __future__ import annotations

import ssl
import time
from types import SimpleNamespace
from typing import Any

import pytest
from chaos import faults
from chaos.faults import AGGREGATOR, GCS, RAYLET, RELAY
from chaos.harness import HERE, TRAIN, Case, after, check, plain, row, run
from chaos.stopwatch import Stopwatch

from traceml_ray.launchers.cluster import free_port

BOTH = ("socket", "actor")
HOUR = 3600.0
NOWHERE = "192.0.2.1"
"""An address for documentation, which no machine has."""

SHORT = [
    Case(
        "bad and replayed messages, then relay stopped", faults.in_turn(faults.spoken, faults.stopped(RELAY))
    ),
    Case(
        "aggregator stopped, then GCS killed",
        faults.in_turn(faults.stopped(AGGREGATOR), faults.killed(GCS)),
        "actor",
    ),
    Case("aggregator killed while disk full", faults.filled(kill=AGGREGATOR, freed=True), disk_mb=4),
]
"""Two harms in a run are also cases of their own."""

LONG = [
    Case("aggregator and relay killed", faults.killed(AGGREGATOR, RELAY)),
    Case("session file corrupted", faults.corrupted, whole=False),
    Case("socket taken over, relay killed", faults.stolen(kill=True)),
    *(
        Case(name, fault, channel, **dict(*more))
        for channel in BOTH
        for name, fault, *more in [
            ("nothing", faults.nothing),
            ("relay killed", faults.killed(RELAY)),
            ("relay stopped, goes on", faults.stopped(RELAY, go_on=True)),
            ("relay stopped", faults.stopped(RELAY)),
            ("relay hangs in a message", faults.hung("relay"), {"injected": True}),
            ("aggregator killed", faults.killed(AGGREGATOR)),
            ("aggregator stopped, goes on", faults.stopped(AGGREGATOR, go_on=True)),
            ("aggregator stopped", faults.stopped(AGGREGATOR)),
            ("aggregator hangs in a message", faults.hung("aggregator"), {"injected": True}),
            ("aggregator slow", faults.slow),
            ("raylet killed", faults.killed(RAYLET)),
            ("raylet stopped, goes on", faults.stopped(RAYLET, go_on=True)),
            ("raylet stopped", faults.stopped(RAYLET)),
            ("GCS killed", faults.killed(GCS)),
            ("GCS stopped", faults.stopped(GCS)),
            ("raylet of another node killed", faults.killed(RAYLET, node=1), {"nodes": 2, "whole": False}),
            ("raylet of another node stopped", faults.stopped(RAYLET, node=1), {"nodes": 2}),
        ]
    ),
    *(
        Case(
            f"profile under way, {what}",
            faults.profiled(*names),
            script=("--steps", "900", *end),
            whole=not end,
            hook_ms=500.0,
        )
        for what, names, *end in [
            ("nothing", ()),
            ("relay killed", (RELAY,)),
            ("aggregator killed", (AGGREGATOR,)),
            ("both killed", (RELAY, AGGREGATOR)),
            ("the script raises", (), "--end", "raise"),
        ]
    ),
    *(
        Case(
            "GCS gone for 120 s", faults.killed(GCS), channel, ("--steps", "300", "--ms", "480"), limit_s=260
        )
        for channel in BOTH
    ),
    Case("disk full", faults.filled(), disk_mb=4, session=False, whole=False),
    Case("disk full for a while", faults.filled(freed=True), disk_mb=4),
    Case("disk hangs", faults.disk_hangs(), injected=True, session=False, whole=False),
    Case("disk frozen", faults.frozen, disk_mb=64, can_freeze=True, session=False, whole=False),
    Case("disk hangs for a while", faults.disk_hangs(go_on=True), injected=True),
    Case("session folder read-only", faults.read_only, session=False),
    Case("bundle cannot be written", faults.unbundled),
    Case("session folder removed", faults.removed, session=False),
    *(
        Case(f"clock of the {who} {seconds:+.0f} s", faults.clock(who, seconds), injected=True)
        for who in ("monitor", "rank")
        for seconds in (HOUR, -HOUR)
    ),
    Case("bad and replayed messages", faults.spoken),
    Case("flood of messages", faults.flooded),
    Case("socket taken over", faults.stolen()),
    Case("socket removed, relay killed", faults.unlinked),
    *(
        Case(
            "every sink dead, then hanging, then refusing",
            faults.sinks_harmed(port),
            channel,
            script=("--steps", "150", "--ms", "24", "--tracker"),
            flags=(
                *("--metrics-port", "9", "--metrics-host", NOWHERE, "--alerts", str(HERE / "alerts.toml")),
                *("--kubeflow", "--ray-metrics", "--otel", "--log-to", "auto"),
            ),
            environ={
                "CHAOS_PLACE": f"http://127.0.0.1:{port}",
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
                "OTEL_METRIC_EXPORT_INTERVAL": "1000",
                "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{port}",
                "KUBEFLOW_TRAINER_SERVER_CA_CERT": ssl.get_default_verify_paths().cafile or "",
                "KUBEFLOW_TRAINER_SERVER_TOKEN": str(HERE / "token.txt"),
            },
        )
        for channel, port in zip(BOTH, (free_port(), free_port()), strict=True)
    ),
    Case("Ray not installed", environ={"PYTHONPATH": str(HERE / "without_ray")}, up=False),
    Case("no cluster there", flags=("--ray-address", f"127.0.0.1:{free_port()}"), up=False),
    *(
        Case(f"the script {what}", faults.nothing, channel, ("--end", end), whole=False)
        for channel in BOTH
        for what, end in [
            ("calls sys.exit(3)", "exit"),
            ("raises", "raise"),
            ("calls os._exit(7)", "gone"),
            ("gets SIGTERM", "term"),
            ("gets SIGINT", "int"),
        ]
    ),
    *(
        Case(f"device's clock, {name}", fault, script=("--device", *end), whole=not end)
        for name, fault, *end in [
            ("aggregator and relay killed", faults.killed(AGGREGATOR, RELAY)),
            ("raylet killed", faults.killed(RAYLET)),
            ("a rank gets SIGKILL", faults.nothing, "--end", "kill"),
        ]
    ),
    *(
        Case(f"children: {method}", faults.nothing, channel, ("--children", method))
        for channel in BOTH
        for method in ("fork", "spawn")
    ),
    Case("raylet stopped, script forks", faults.stopped(RAYLET), "actor", ("--children", "fork")),
    Case("GCS killed, script raises", faults.killed(GCS), "actor", ("--end", "raise"), whole=False),
    *(
        Case(f"Ray Train, {name}", fault, "actor", command=TRAIN)
        for name, fault in [
            ("nothing", faults.nothing),
            ("relay killed", faults.killed(RELAY)),
            ("relay stopped", faults.stopped(RELAY)),
            ("aggregator killed", faults.killed(AGGREGATOR)),
            ("aggregator stopped", faults.stopped(AGGREGATOR)),
            ("aggregator slow", faults.slow),
            ("bad and replayed messages", faults.spoken),
        ]
    ),
    Case("Ray Train, children: fork", faults.nothing, "actor", ("--children", "fork"), command=TRAIN),
]

CASES = [
    *(pytest.param(case, id=case.title) for case in SHORT),
    *(pytest.param(case, id=case.title, marks=pytest.mark.long) for case in LONG),
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES)
def test_training_is_unaffected_by_faults_of_the_monitor(case: Case, record_property: Any) -> None:
    plain(case)
    got = run(case)
    expected = after(case, got)
    record_property("chaos", row(case, got, expected))
    check(case, got, expected)


def test_stopwatch_counts_blocking_and_computing_hooks_but_not_the_original() -> None:
    def compute() -> None:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass

    watch = Stopwatch()
    watch.outer("original", watch.inner(lambda: time.sleep(0.02)))()
    assert watch.longest_ns < 5e6
    for harm in (lambda: time.sleep(0.02), compute):
        watch = Stopwatch()
        watch.outer("hook", harm)()
        assert (watch.where, watch.longest_ns > 10e6) == ("hook", True)


def test_stopwatch_takes_out_only_waits_for_a_processor_that_are_in_the_hook(monkeypatch: Any) -> None:
    watch = Stopwatch()
    watch.outer("before", lambda: None)()
    me = watch._local.accounts[0] = SimpleNamespace(ns=(0, 0))
    me.read = lambda: me.ns
    watch._local.again = time.monotonic() + 60
    clocks = watch._clocks

    def preempted() -> tuple[int, ...]:
        monkeypatch.setattr(watch, "_clocks", clocks)
        read = clocks()
        me.ns = (0, me.ns[1] + 15_000_000)
        return read

    monkeypatch.setattr(watch, "_clocks", preempted)
    watch.outer("hook", lambda: time.sleep(0.02))()
    assert (watch.where, watch.longest_ns > 15e6) == ("hook", True)
