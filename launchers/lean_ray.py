"""
Starts Ray without the parts that a monitor does not use: API server, dashboard agent, runtime-env agent.

They take half of the CPU time of a start, and 170 MB. No option of Ray's command line leaves them out, so
this module replaces two functions in the process of `ray start`. A Ray newer than those tested stays
unchanged. If a Ray older than 2.55 joins a cluster, two things are changed to work as in 2.55.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

from traceml_ray.launchers.min_versions import release_of

_TRIED = (2, 51), (2, 60)
"""The oldest and the newest Ray on which a session has been started without these parts (`make compat`)."""
_AGENT = re.compile(r"--(dashboard|runtime_env)_agent_command=")
_PLACEHOLDER = f'{sys.executable} -IS -c "import signal; signal.pause()"'
"""Command that replaces an agent: the raylet expects a process that lives as long as it does."""
_FOLDER_PER_NODE = 2, 55
"""The first Ray that respects `--temp-dir` on a node that joins a cluster (Ray's pull request 57735)."""
_LOOK_S = 0.05


def disable_agents() -> None:
    """Make `ray start`, run later in this process, start without Ray's agents and dashboard."""
    import ray
    from ray._private import services

    if not _TRIED[0] <= release_of(ray.__version__) <= _TRIED[1]:
        return
    start = services.start_ray_process

    def start_ray_process(command: list[str], *args: Any, **keywords: Any) -> Any:
        if any(map(_AGENT.match, command)):
            _report_ports(command)
            command = [_AGENT.sub(rf"\g<0>{_PLACEHOLDER}\0", word).partition("\0")[0] for word in command]
        return start(command, *args, **keywords)

    services.start_ray_process = start_ray_process
    # Ray itself returns this where the server could not be started.
    services.start_api_server = lambda *_, **__: (None, None)


def _report_ports(command: list[str]) -> None:
    """
    Report the ports of the agents, none of which is used, to the raylet. It waits for that since
    Ray 2.54.
    """
    from ray import _raylet

    if not hasattr(_raylet, "persist_port"):
        return
    given = {name.replace("-", "_"): value for name, _, value in (word.partition("=") for word in command)}
    for name in dir(_raylet):
        if name.endswith("_PORT_NAME") and not name.startswith("GCS_"):
            _raylet.persist_port(given["__session_dir"], given["__node_id"], getattr(_raylet, name), -1)


def use_temp_dir(arguments: list[str]) -> None:
    """Make `ray start`, run later in this process, use the `--temp-dir=` in `arguments`."""
    import ray
    from ray._private.parameter import RayParams

    if release_of(ray.__version__) >= _FOLDER_PER_NODE:
        return
    (folder,) = (word.partition("=")[2] for word in arguments if word.startswith("--temp-dir="))
    init = RayParams.__init__

    def with_folder(self: Any, *args: Any, **keywords: Any) -> None:
        init(self, *args, **{**keywords, "temp_dir": keywords.get("temp_dir") or folder})

    RayParams.__init__ = with_folder  # type: ignore[method-assign]


def until_joined(temp_dir: str) -> None:
    """
    Return once the raylet with its files in `temp_dir` is known to its cluster.

    An older Ray sends a process that attaches earlier to the head's raylet. The process does not reach it,
    and is ended.
    """
    import ray

    while (
        release_of(ray.__version__) < _FOLDER_PER_NODE and not Path(temp_dir, "ray_current_cluster").exists()
    ):
        time.sleep(_LOOK_S)  # `ray start` writes this file last
