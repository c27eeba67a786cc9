"""
Starts a session from a driver: `ray.init(); traceml_ray.start()`.

The session's actors are detached: they outlive the driver, and end themselves after `idle_ttl` seconds
without any message.

This module also sends this package to nodes that lack it.
"""

from __future__ import annotations

import atexit
import importlib
import json
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

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
from traceml_ray.settings import Settings, of_driver


def upload() -> str:
    """
    Upload this package, as it is imported here, to the cluster's store. Return its URI for `py_modules`.

    The environment of Ray Train's workers and of all other code of the user is not changed.
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


def start(
    settings: Settings | None = None,
    *,
    runtime_env: dict[str, Any] | None = None,
    ship: bool = False,
    **fields: Any,
) -> Session:
    """
    Start the monitor on every node of the cluster this driver is connected to, or find the one that runs.

    From here on every TorchTrainer of this driver is watched. The session reserves none of the cluster's CPUs
    or GPUs. Returns when the aggregator answers; the relays follow (`Session.wait_ready`). Call it from one
    thread at a time. A running session keeps its settings; a warning names the ones given here that are
    ignored.

    Args:
        settings: of the session. An editor completes the fields of `start(Settings(interval=1))`.
        runtime_env: of the session's actors, for nodes that need one; local paths are not for these.
        ship: send this package to nodes that lack it (its dependencies must be there).
        fields: fields of `Settings` by name, as in `start(session="a", interval=1)`. They override
            `settings`; what neither has is as in the environment, else as by default.

    Raises:
        StartError: Ray is not initialised or too old, the session of that name is of another version,
            or its folder cannot be written.
        SettingError: a name or value that cannot be used.
    """
    given = of_driver(settings, fields)
    loaded = Settings.load(**given)
    name = loaded.session or DEFAULT_SESSION
    _check_ray()
    aggregator = find_aggregator(name)
    if aggregator is not None:
        kept = sorted(given.keys() - {"session"})
        if kept:
            warnings.warn(
                f"session {name!r} runs already and keeps the settings it was started with; ignored: "
                f"{', '.join(kept)}",
                stacklevel=2,
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
    """Return the session that this process has started; None if it has started none, or has no Ray."""
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
    """
    Create the aggregator here and a relay on every node, in parallel. Return when the
    aggregator answers.
    """
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
    """Whether this process has started the cluster, which then ends with this process."""
    import ray

    node: Any = ray._private.worker._global_node
    return node is not None and bool(node.is_head())


def _stop_quietly(session: Session) -> None:
    """
    Stop the session at the end of a driver that ends its cluster, or has ended it before, so that the
    session's files are complete.
    """
    try:
        session.stop(EXIT_S)
    except Exception as error:
        sys.stderr.write(f"traceml-ray: session {session.id!r} may be incomplete: {cause_of(error)}\n")


def _runtime_env(given: dict[str, Any] | None, ship: bool) -> str:
    """Return the runtime_env of the actors as JSON. With `ship`, it includes this package."""
    env = dict(given or {})
    if ship:
        env["py_modules"] = [*env.get("py_modules", []), upload()]
    return json.dumps(env) if env else ""
