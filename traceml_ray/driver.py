"""
Starts a session from a driver: `ray.init(); traceml_ray.start()`.

The session's actors are detached: they outlive the driver, and end themselves when nothing has come for
`idle_ttl` seconds.

Sends this package to nodes that lack it.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.errors import cause_of
from traceml_ray.launchers.min_versions import FLOORS, too_old
from traceml_ray.launchers.ray_train import watch_trainers
from traceml_ray.live_session import START_S, Session, StartError
from traceml_ray.monitor.finish import EXIT_S
from traceml_ray.ray.actors import (
    DEFAULT_SESSION,
    ActorConfig,
    cluster_nodes,
    configure,
    current_config,
    find_aggregator,
    remember,
)
from traceml_ray.settings import Settings, given, known_keywords


def upload() -> str:
    """
    Put this package, as it is imported here, into the cluster's store; return its URI for `py_modules`.

    What Ray Train's workers and anything else of the user's run with is not touched.
    """
    from ray._private.runtime_env.py_modules import upload_py_modules_if_needed

    with tempfile.TemporaryDirectory(prefix="traceml-") as folder:
        package = Path(folder) / "traceml_ray"
        for name in ("traceml_ray", "traceml_ray.launchers", "traceml_ray.dash_app"):
            # In a checkout the latter two lie beside the package, not in it.
            source = Path(importlib.import_module(name).__path__[0])
            target = package.joinpath(*name.split(".")[1:])
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        env = upload_py_modules_if_needed({"py_modules": [str(package)]}, False, scratch_dir=folder)
    uri: str = env["py_modules"][0]
    return uri


@known_keywords
def start(
    session: str | None = None,
    *,
    runtime_env: dict[str, Any] | None = None,
    ship: bool = False,
    out: str | os.PathLike[str] | None = None,
    interval: float | None = None,
    ring_rows: int | None = None,
    agent_buffer_bytes: int | None = None,
    relay_buffer_bytes: int | None = None,
    session_bytes: int | None = None,
    bundles: int | None = None,
    bundle_bytes: int | None = None,
    bundle_minutes: float | None = None,
    profile_bytes: int | None = None,
    auto_profile: int | None = None,
    auto_profile_minutes: float | None = None,
    output_lines: int | None = None,
    idle_ttl: float | None = None,
    device_clock: str | None = None,
    memory_history: bool | None = None,
    deep: bool | None = None,
    flops: bool | None = None,
    model_flops: float | None = None,
    peak_tflops: float | None = None,
    total_steps: int | None = None,
    debug: bool | None = None,
    baseline: str | os.PathLike[str] | None = None,
    thresholds: Thresholds | Mapping[str, float] | None = None,
) -> Session:
    """
    Start the monitor on every node of the cluster this driver is connected to, or find the one that runs.

    From here on every TorchTrainer of this driver is watched. Nothing of the cluster's CPUs or GPUs
    is held. Returns when the aggregator answers; the relays follow (`Session.wait_ready`). Call it from one
    thread at a time. A session that runs already keeps its settings; a warning names those given here.

    What is not given is as in the environment (`TRACEML_` + the name in capitals), else as by default.

    Args:
        session: name, 1 to 64 letters, digits, `.`, `_`, `-`; sessions of different names on one cluster do
            not meet. Default: `default`.
        runtime_env: of the session's actors, for nodes that need one; local paths are not for these.
        ship: send this package to nodes that lack it (its dependencies must be there).
        out: folder that holds session folders, on this node; of a driver outside of the cluster on the head,
            under its home. Default: `traceml-sessions`.
        interval: seconds between two reports of a rank, 0.05 to 60; twice that in jobs of over 256 ranks.
            Default: 0.5.
        ring_rows: rows (one a step) that the training thread may be ahead of the thread that sends them,
            64 to 1048576; what is more is dropped and counted. Default: 4096.
        agent_buffer_bytes: what a rank keeps unconfirmed, 64 KiB to 1 GiB. Default: 1 MiB.
        relay_buffer_bytes: the same of a node, 1 MiB to 64 GiB. Default: 64 MiB.
        session_bytes: beyond this size of the session file its oldest rows become statistics, 1 MiB to
            16 TiB. Default: 1 GiB.
        bundles: how many bundles (the last minutes of every rank, kept of an incident) there are at most, the
            newest, 0 to 1000. Default: 10.
        bundle_bytes: how large they may be together, 1 MiB to 16 TiB. Default: 512 MiB.
        bundle_minutes: how much of each rank is in one, 0.1 to 60. Default: 5.
        profile_bytes: how large all profiles may be together, 1 MiB to 16 TiB. Default: 1 GiB.
        auto_profile: how often a verdict that lasts has a run profiled without being asked, 0 to 100.
            Default: 3.
        auto_profile_minutes: and how long it waits between two, 0.1 to 1440. Default: 30.
        output_lines: how many of the last lines of each rank's stdout and stderr are kept, 0 to 200; 0: none
            are read. Default: 40.
        idle_ttl: seconds without any message after which the session ends itself, 1 to 2592000 (30 days).
            Default: 600.
        device_clock: `1` takes the times of CUDA jobs from the device's own clock, `0` never does, `auto`
            does where steps take 40 ms or more. Default: `auto`.
        memory_history: have torch record each allocation on a CUDA device, and write its record when memory
            runs out, for PyTorch's memory viewer. Default: False.
        deep: measure the time and memory of each layer, in as many steps as cost at most 3 % of a step.
            Default: False.
        flops: count the model FLOPs of a step, once, by torch's FlopCounterMode; the third step then takes
            longer. Default: False.
        model_flops: model FLOPs of a step of all ranks together, 1 to 1e27; nothing is counted then.
        peak_tflops: what one device can do, in 10¹² FLOPs a second, 0.0001 to 1e6. Default: what its maker
            says.
        total_steps: how many steps the job is going to take, 1 to 1e15.
        debug: raise what is swallowed and counted otherwise, or print it where a thread has to go on.
            Default: False.
        baseline: name or path of a stored session that was good: what steps are expected to cost.
        thresholds: limits of the verdict, by name, see `analysis/thresholds.py`.

    Raises:
        StartError: Ray is not initialised or too old, the session of that name is of another version,
            or its folder cannot be written.
        SettingError: a keyword, name or value that cannot be used.
    """
    chosen = given(locals())
    loaded = Settings.load(**chosen)
    name = loaded.session or DEFAULT_SESSION
    _check_ray()
    aggregator = find_aggregator(name)
    if aggregator is not None:
        kept = sorted(chosen.keys() - {"session"})
        if kept:
            warnings.warn(
                f"session {name!r} runs already; {', '.join(kept)} are as they were when it started",
                stacklevel=3,
            )
        made = Session(name, aggregator, START_S)
    else:
        made = _make(configure(loaded, _runtime_env(runtime_env, ship)))
        if _cluster_is_ours():
            atexit.register(_stop_quietly, made)
    remember(made.config)
    watch_trainers()
    return made


def session_here() -> Session | None:
    """Return the session that this process has started; None where it has none, or has no Ray."""
    config, ray = current_config(), sys.modules.get("ray")
    if config is None or ray is None or not ray.is_initialized():
        return None
    aggregator = find_aggregator(config.session)
    return None if aggregator is None else Session(config.session, aggregator)


def _check_ray() -> None:
    import ray

    if not ray.is_initialized():
        raise StartError("Ray is not initialised in this process: call ray.init() before traceml_ray.start()")
    for package in FLOORS:
        if lack := too_old(package):
            raise StartError(lack)


def _make(config: ActorConfig) -> Session:
    """Make the aggregator here and a relay on every node, side by side; return when the former answers."""
    import ray

    from traceml_ray.ray.aggregator import ensure_aggregator
    from traceml_ray.ray.membership import ensure_relay

    aggregator = ensure_aggregator(config, ray.get_runtime_context().get_node_id())
    relays = [ensure_relay(config, node["NodeID"]) for node in cluster_nodes() if node["Alive"]]
    try:
        return Session(config.session, aggregator, START_S)
    except StartError:
        for actor in (aggregator, *relays):
            ray.kill(actor, no_restart=True)
        raise


def _cluster_is_ours() -> bool:
    """Whether this process has started the cluster, which then ends with it."""
    import ray

    node: Any = ray._private.worker._global_node
    return node is not None and bool(node.is_head())


def _stop_quietly(session: Session) -> None:
    """End of a driver that takes its cluster along, or has ended it before: let the session be whole."""
    try:
        session.stop(EXIT_S)
    except Exception as error:
        sys.stderr.write(f"traceml-ray: session {session.id!r} may be incomplete: {cause_of(error)}\n")


def _runtime_env(given: dict[str, Any] | None, ship: bool) -> str:
    """Return the runtime_env of the actors as JSON; with `ship`, this package is in it."""
    env = dict(given or {})
    if ship:
        env["py_modules"] = [*env.get("py_modules", []), upload()]
    return json.dumps(env) if env else ""
