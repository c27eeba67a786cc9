"""The end of a session, as a driver orders it; what its aggregator has not written comes from its file."""

from __future__ import annotations

import contextlib
import re
import time
import warnings

import psutil

from traceml_ray import wire
from traceml_ray.errors import cause_of
from traceml_ray.launchers.ray_train import leave_trainers
from traceml_ray.monitor.finish import ANSWER_S, KILL_S, LEAVE_S
from traceml_ray.monitor.private_folders import is_private
from traceml_ray.ray.config import current_config, forget
from traceml_ray.ray.discovery import answers, find_aggregator, find_relays, relay_folder, relay_nodes
from traceml_ray.session_calls import EndedError, SessionCalls, StartError
from traceml_ray.session_state import holder

_POLL_S = 0.05


def stop_session(calls: SessionCalls, timeout: float) -> None:
    """End a session, see `Session.stop`. Raises StartError."""
    import ray

    deadline, name = time.monotonic() + timeout, calls.name
    if not ray.is_initialized():
        _stop_without_ray(calls, deadline)
        return
    if calls.is_gone() and find_aggregator(name) is not None:
        return  # what has its name by now is another session
    forget(name)
    if current_config() is None:
        leave_trainers()
    finished = _end_actors(calls, timeout)
    while find_aggregator(name) is not None or relay_nodes(name):
        if time.monotonic() > deadline:
            raise StartError(f"session {name!r} is still there {timeout:g} s after it was stopped")
        time.sleep(_POLL_S)
    calls.has_ended = True
    if finished is None:
        _finish_from_file(calls)
    elif not finished.ok:
        raise StartError(f"session {name!r} has ended, but its files could not be written: {finished.detail}")


def _end_actors(calls: SessionCalls, timeout: float) -> wire.Finished | None:
    """Have all actors of the session end; return the aggregator's answer, None where there is none."""
    import ray

    relays = find_relays(calls.name).values()
    try:
        if answers(calls.aggregator, min(ANSWER_S, timeout / 2)):
            reply = ray.get(calls.aggregator.stop.remote(), timeout=max(0.1, timeout - 1))
            return wire.decode(reply, wire.Finished)
    except (ray.exceptions.RayError, ValueError):
        pass
    ray.kill(calls.aggregator, no_restart=True)
    ending = [relay.end.remote(0.0) for relay in relays]
    if ending:
        ray.wait(ending, num_returns=len(ending), timeout=min(LEAVE_S, timeout / 4))
    for relay in relays:
        ray.kill(relay, no_restart=True)
    return None


def _stop_without_ray(calls: SessionCalls, deadline: float) -> None:
    """End a session whose cluster has ended with `ray.shutdown()`, where its files are here."""
    if calls.has_ended:
        return
    calls.check_file()
    while holder(calls.folder) is not None:
        if time.monotonic() > deadline:
            raise StartError(
                f"session {calls.name!r} runs, and Ray was shut down in this process: "
                f"traceml-ray stop {calls.folder}"
            )
        time.sleep(_POLL_S)
    forget(calls.name)
    calls.has_ended = True
    _finish_from_file(calls)


def _finish_from_file(calls: SessionCalls) -> None:
    """Write the reports that the aggregator did not, of what it had stored, where its files are here."""
    from traceml_ray.monitor.offline import finish_offline

    try:
        if calls.is_finished():
            return
        over = wire.Finish(wire.VERSION, 0)
        end_hung(holder(calls.folder))
        left = relay_folder(calls.name, calls.node_id)
        finish_offline(calls.folder, calls.config.settings, over, left if is_private(left) else None)
    except EndedError:  # its files are on another node
        return
    except Exception as error:
        warnings.warn(f"no report of session {calls.name!r}: {cause_of(error)}", stacklevel=4)


def end_hung(pid: int | None) -> None:
    """End an aggregator of this node that Ray has told to go, and that hears nothing."""
    if pid is None:
        return
    with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):  # it has ended by itself
        process = psutil.Process(pid)
        if re.match(r"ray::(.*:)?Aggregator", "".join(process.cmdline()[:1])):  # `NAME:` while it is made
            process.kill()
            process.wait(KILL_S)
