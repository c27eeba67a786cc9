"""
Checks, without Ray, whether the head of a Ray cluster can be reached, and from what address. `ray.init` to a
dead address never returns.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from traceml_ray.ray.actors import NAMESPACE, Attachment

ONE_NODE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""
Keeps Ray on 127.0.0.1. Without this, Ray takes 127.0.0.1 for an address of this machine that others can
reach.
"""
_TRY_S = 2.0
_TOKEN_FILE = ".ray/auth_token"
_TOKEN_OF_KUBERNETES = "RAY_ENABLE_K8S_TOKEN_AUTH"
_GIVE_TOKEN = (
    "set RAY_AUTH_MODE=token, and the cluster's token in RAY_AUTH_TOKEN, in a file that RAY_AUTH_TOKEN_PATH "
    "names, or in ~/.ray/auth_token"
)
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""First bytes of an HTTP/2 connection, which gRPC uses."""
_AGAIN_S = 0.05
_NOBODY = "192.0.2.1"
"""An address that is only used to find the local address that routes to it. Nothing is sent."""


def attach(where: Attachment, timeout_s: float, before: Callable[[Any], None] = lambda _ray: None) -> None:
    """
    Attach this process to a Ray cluster, changing the environment as needed.

    Args:
        where: the cluster.
        timeout_s: how long to wait until something listens there.
        before: called with the imported `ray` module before it attaches.

    Raises ConnectionError when the cluster cannot be reached or does not accept our token. Also raises what
    `ray.init` raises.
    """
    address, _ = resolve_address(where.address, timeout_s)
    set_environ(
        {
            # A lost head does not end this process a minute later.
            "RAY_gcs_rpc_server_reconnect_timeout_s": "31536000",
            # The working directory of a `uv run` is not uploaded.
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            # An older Ray does not print its plans to the stderr of the script.
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            **(ONE_NODE if address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]") else {}),
            **where.environ,
        }
    )
    if why := _lacks_token():  # Ray's library would abort the process
        raise ConnectionError(why)
    _load_library()  # now: it reads the environment
    import ray

    before(ray)
    if why := _refusal(address):
        raise ConnectionError(why)
    temp_dir: dict[str, Any] = {"_temp_dir": where.temp_dir} if where.temp_dir else {}
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False, **temp_dir)


def find_token(environ: Mapping[str, str]) -> tuple[str, str]:
    """
    Return the token that Ray uses in an environment ("": none), and the place where it is, or was looked for
    last. Ray uses the token only with RAY_AUTH_MODE=token.
    """
    if token := environ.get("RAY_AUTH_TOKEN", "").strip():
        return token, "RAY_AUTH_TOKEN"
    given = environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(given) if given else Path(environ.get("HOME", "~")).expanduser() / _TOKEN_FILE
    source = f"{path} (RAY_AUTH_TOKEN_PATH)" if given else str(path)
    try:
        return path.read_text().strip(), source
    except (OSError, UnicodeDecodeError):
        return "", source


def _uses_token() -> bool:
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def _lacks_token() -> str:
    """Return what is missing if this process must show a token and has none; "" otherwise."""
    token, source = find_token(os.environ)
    if token or not _uses_token() or _TOKEN_OF_KUBERNETES in os.environ:
        return ""
    unset = "RAY_AUTH_TOKEN is not set"
    return f"RAY_AUTH_MODE=token, but no token was found: {unset}, and {source} has none"


def _refusal(address: str) -> str:
    """
    Return why the cluster refuses this process for lack of the right token. "": it does not, or that cannot
    be known. `ray.init` takes 20 s to find out, and only reports that it has failed to connect.
    """
    from ray import _raylet, exceptions

    client: Any = getattr(_raylet, "GcsClient", None)  # of no public API
    refused: Any = getattr(exceptions, "AuthenticationError", ())  # an older Ray has no tokens
    try:
        client(address=address).check_alive([], timeout=_TRY_S)
    except refused:
        if not _uses_token():
            return f"the Ray cluster at {address} requires a token: {_GIVE_TOKEN}"
        return f"the Ray cluster at {address} refuses the token of {find_token(os.environ)[1]}: {_GIVE_TOKEN}"
    except Exception:  # what else is wrong, `ray.init` reports
        pass
    return ""


def _load_library() -> None:
    """
    Load Ray's library as its import does, but without holding the GIL: Ray's own import holds it
    for 15 ms.
    """
    spec = importlib.util.find_spec("ray")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        ctypes.CDLL(None).dlopen(os.fsencode(Path(folder) / "_raylet.so"), os.RTLD_NOW)


def set_environ(values: Mapping[str, str | None]) -> None:
    """Set environment variables. A value of None removes the variable."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def resolve_address(address: str, timeout_s: float) -> tuple[str, str]:
    """
    Return (ip:port of the head, local address of the route to it) once something listens at `address`.

    Names are resolved anew at each attempt, because the name of the head may not exist yet. Raises
    ConnectionError after `timeout_s`.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=_TRY_S) as connection:
                peer, local = connection.getpeername(), connection.getsockname()
                _greet(connection)
            return join(peer[0], peer[1]), local[0]
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConnectionError(f"nothing answers at {address} ({error})") from None
        time.sleep(_AGAIN_S)


def _greet(connection: socket.socket) -> None:
    """
    Wait for the first bytes of a gRPC server: the kernel accepts connections even for a stopped
    process.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("0", "false", ""):
        connection.sendall(_GREETING)
        if not connection.recv(1):
            raise ConnectionError("it hung up")


def raylet_answers(relay_pid: int) -> bool:
    """Return whether the raylet of a relay, which is its worker, answers on any of its ports."""
    raylet: Any = psutil.Process(relay_pid).parent()
    if raylet is None:
        return False
    sockets = raylet.net_connections if hasattr(raylet, "net_connections") else raylet.connections
    for listener in [listener for listener in sockets() if listener.status == "LISTEN"]:
        host = listener.laddr.ip.removeprefix("::ffff:")
        try:
            where = "127.0.0.1" if host in ("0.0.0.0", "::") else host, listener.laddr.port
            with socket.create_connection(where, timeout=_TRY_S) as connection:
                _greet(connection)
            return True
        except OSError:
            continue
    return False


def join(host: str, port: int) -> str:
    """Return host:port. An address that contains colons is put into brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def node_address(head: str, rank: int, source: str = "") -> str:
    """
    Return the address under which the others reach this node.

    Args:
        head: host:port of the cluster's head.
        rank: rank of this node. Several launchers on one machine each have a loopback address.
        source: local address of the route to the head. "": it is looked up.
    """
    host, _, port = head.rpartition(":")
    source = source or _source_address(host.strip("[]"), int(port))
    if not source.startswith("127."):
        return source
    if host.startswith("127."):
        return f"127.0.0.{2 + rank % 250}"
    return _source_address(_NOBODY, 9)  # a machine that knows its own name only as 127.0.1.1


def _source_address(host: str, port: int) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        ip: str = probe.getsockname()[0]
    return ip
