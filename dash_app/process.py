"""
The dashboard's process: opens a session, polls it once a tick for all browsers, and serves the web app.

It ends at SIGTERM or Ctrl-C, or with the process that started it. A launcher's dashboard (`--child --linger`)
stays and shows the stored session while a browser watches. To stay, it executes itself anew with the same
socket and pid but without Ray, because Ray ends a process whose cluster is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlencode

import waitress

from traceml_ray.launchers.cluster import free_port
from traceml_ray.launchers.view_processes import LINGERS
from traceml_ray.settings import Settings
from traceml_ray.text import exit_now, exit_soon, show
from traceml_ray.views import serving
from traceml_ray.views.source import open_source

from . import security
from .server import create_app
from .session_pages import SessionPages

PORT = 8050
"""The default port. If it is taken, a free one is used."""
POLL_S = 1.0
_LOOK_S = 0.2
WATCHED_S = 30.0
"""A browser counts as watching if it has sent a request within this time, in s."""
_WAITRESS = {
    "threads": 8,
    "ident": None,
    "max_request_header_size": 1 << 16,
    "max_request_body_size": security.MAX_BODY_BYTES,
    "channel_timeout": 30,
}


def run(arguments: argparse.Namespace) -> int:
    """
    Serve the session that `traceml-ray dashboard` was given until SIGTERM or Ctrl-C, and end this process.

    Raises SessionError or SourceError if there is no such session, SettingError for a setting or token that
    is wrong, OSError if it cannot listen at the address.
    """
    signal.signal(signal.SIGTERM, _end)
    for noisy in ("ray._private.worker", "waitress.queue"):  # of its own signals; of every request that waits
        logging.getLogger(noisy).setLevel(logging.ERROR)
    token, made_up = security.choose_token(arguments.token, arguments.host)
    settings = Settings.load(out=arguments.out)
    stays = arguments.listening > 0
    if stays:
        listening = socket.socket(fileno=arguments.listening)
    else:
        listening = _listen(arguments.host, arguments.port)
    source = open_source(arguments.session, settings.out, arguments.ray_address, file=stays)
    code = 1
    try:
        session = SessionPages(source, thresholds=settings.thresholds)
        if stays:  # a browser keeps the page that it has
            session.poll()
        hosts = [*serving.names_of(arguments.host), *arguments.allow_host]
        app = create_app(session, token=token, hosts=hosts, poll_s=POLL_S)
        threads = [_thread("poll", _poll, session), _thread("serve", _serve, app.server, listening)]
        query = {"token": token if made_up else None, "run": arguments.run}
        show(f"Dashboard: {_url(arguments.host, listening, query)}")
        parent = _thread("linger", _linger, session, arguments.linger) if stays else _parent(arguments.child)
        while parent.is_alive() and all(thread.is_alive() for thread in threads):
            time.sleep(_LOOK_S)
            signal.signal(signal.SIGTERM, _end)  # Ray installs its own handlers when it attaches
        if arguments.linger and not stays and not parent.is_alive() and session.watched_within(WATCHED_S):
            _stay(arguments, listening, settings.out, token)
        code = int(parent.is_alive())
    except (KeyboardInterrupt, SystemExit):
        code = 0
    finally:
        exit_soon(code)
        source.close()
    return exit_now(code)


def _linger(session: SessionPages, most_s: float, sleep: Callable[[float], object] = time.sleep) -> None:
    """Return when no browser has watched for a while, or after `most_s`."""
    session.note_watched()  # by the browser for which it stays
    until = session.timer() + most_s
    while session.watched_within(WATCHED_S) and session.timer() < until:
        sleep(_LOOK_S)


def _stay(arguments: argparse.Namespace, listening: socket.socket, out: str, token: str | None) -> NoReturn:
    """Become a process without a parent that serves the session's file on the same socket."""
    show(LINGERS)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the list itself is closed again
            os.set_inheritable(int(entry.name), int(entry.name) in (0, 1, 2, listening.fileno()))
    command = [sys.executable, "-m", "traceml_ray.cli", "dashboard", arguments.session, f"--sessions={out}"]
    command += [
        f"--listening={listening.fileno()}",
        f"--linger={arguments.linger}",
        f"--host={arguments.host}",
    ]
    command += [f"--allow-host={name}" for name in arguments.allow_host]
    os.execve(
        sys.executable, command, {**os.environ, **({"TRACEML_DASHBOARD_TOKEN": token} if token else {})}
    )


def _end(_number: int, _frame: object) -> NoReturn:
    raise SystemExit(0)


def _thread(name: str, target: Callable[..., object], *args: object) -> threading.Thread:
    thread = threading.Thread(name=f"traceml-{name}", target=target, args=args, daemon=True)
    thread.start()
    return thread


def _parent(child: bool) -> threading.Thread:
    """Return a thread that lives as long as the process at the other end of stdin, or as this one."""
    return _thread("parent", os.read, 0, 1) if child else threading.current_thread()


def _poll(session: SessionPages) -> None:
    session.poll()
    gc.collect()
    gc.freeze()  # mostly modules: a full collection would scan them for 0.1 s while a page is made
    while True:
        time.sleep(POLL_S)
        session.poll()


def _serve(application: Any, listening: socket.socket) -> None:
    waitress.create_server(application, sockets=[listening], **_WAITRESS).run()


def _listen(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens at the address. Raises OSError."""
    wanted = PORT if port is None else port or free_port()
    try:
        return serving.listen(host, wanted)
    except OSError as error:
        if port is None and error.errno == errno.EADDRINUSE:
            return _listen(host, 0)
        why = serving.not_listening(host, wanted, error)
        raise OSError(f"{why}; choose another with --port") from None


def _url(host: str, listening: socket.socket, query: dict[str, str | None]) -> str:
    given = urlencode({name: value for name, value in query.items() if value is not None})
    return serving.url_of(host, listening) + (f"?{given}" if given else "")
