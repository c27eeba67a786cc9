"""What servers of a session have in common: the address they listen at, and the names they answer to."""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from traceml_ray.ray.connection import join
from traceml_ray.settings import SettingError

WILDCARDS = ("0.0.0.0", "::")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def names_of(host: str) -> list[str]:
    """Return the names that a server bound to `host` answers to; a wildcard is any address."""
    names = [host, *_addresses(host)]
    if is_loopback(host):
        return [*names, *_LOOPBACK]
    return [*names, socket.gethostname(), socket.getfqdn(), *(_LOOPBACK if host in WILDCARDS else ())]


def is_loopback(host: str) -> bool:
    """Return whether all addresses of `host` are loopback. Raises SettingError if it has no address."""
    return all(ipaddress.ip_address(address).is_loopback for address in _addresses(host))


def _addresses(host: str) -> list[str]:
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SettingError(f"host={host!r} has no address: {error}") from None
    return [str(address[0]).partition("%")[0] for *_, address in addresses]


def is_named(header: str, hosts: Collection[str]) -> bool:
    """
    Return whether a `Host` header has one of the names in `hosts` (lower case). Another site whose name is
    made to resolve to this server has none of them.
    """
    try:
        name = (urlsplit(f"//{header}").hostname or "").lower()
        if name in hosts:
            return True
        ipaddress.ip_address(name)  # an address cannot be made to resolve to another
    except ValueError:
        return False
    return any(wildcard in hosts for wildcard in WILDCARDS)


def same(given: str, expected: str) -> bool:
    """Compare secrets in constant time."""
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address. Raises OSError."""
    family, *_, address = min(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))  # IPv4 first
    return socket.create_server(address[:2], family=family, backlog=128)


def not_listening(host: str, port: int, error: OSError) -> str:
    """Return in words that and why `listen` failed."""
    number = error.errno or 0
    why = error.strerror if number < 0 else os.strerror(number)  # a name that has no address, and all others
    return f"cannot listen on {join(host, port)}: {why}"


def url_of(host: str, listening: socket.socket) -> str:
    """Return the URL of a server, which ends with a slash. A wildcard is shown as the name of this host."""
    name = socket.gethostname() if host in WILDCARDS else host
    return f"http://{join(name, listening.getsockname()[1])}/"
