"""Access control: the token, the host names that the server answers to, and the headers of every answer."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Sequence
from html import escape
from typing import cast
from urllib.parse import SplitResult, quote, urlencode, urlsplit

from flask import Flask, Response, redirect, request

from traceml_ray.settings import SettingError
from traceml_ray.views.serving import is_loopback, is_named, same

MAX_BODY_BYTES = 1 << 20
"""Largest body of a request, in bytes; larger ones are refused before they are read."""
_OPEN = (("GET", "/health"), ("HEAD", "/health"), ("POST", "/login"))
_METHODS = ("GET", "HEAD", "POST")
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self' 'unsafe-inline'",  # plotly.js puts rules of its own into the page
    "img-src": "'self' data: blob:",
    "font-src": "'self' data:",
    "connect-src": "'self'",
    "form-action": "'self'",
    "base-uri": "'none'",
    "frame-ancestors": "'none'",
}
_HEADERS = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # not stricter: a form would then be posted with the Origin "null"
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_ASK = "This dashboard asks for the token that was printed when it started."
_WRONG = "That is not the token."
_FORM = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>traceml-ray</title>
<body style="font: 16px system-ui; max-width: 32rem; margin: 15vh auto; padding: 0 1rem">
<h1 style="font-size: 1.25rem">traceml-ray dashboard</h1>
<p role="status">{message}</p>
<form method="post" action="/login?{query}">
<label>Token <input name="token" type="password" autofocus autocomplete="current-password"></label>
<button>Open</button>
</form>
"""


def choose_token(given: str | None, host: str) -> tuple[str | None, bool]:
    """
    Return the token to ask for, or None, and whether it was generated here.

    Without a `given` token, a loopback address needs none, and any other `host` gets a generated token.
    Raises SettingError for a token that is empty or cannot be sent, and for a host without an address.
    """
    if given is not None:
        if not (given.isascii() and given.isprintable() and given.split() == [given]):
            raise SettingError("the token must be printable ASCII without spaces, and not empty")
        return given, False
    return (None, False) if is_loopback(host) else (secrets.token_urlsafe(24), True)


class Guard:
    """
    Checks every request to a Flask server.

    Args:
        token: the required token; None: no token is required.
        hosts: allowed values of the `Host` header. Another site whose name is made to resolve to this server
            gets nothing.
    """

    def __init__(self, token: str | None, hosts: Iterable[str]) -> None:
        self.scripts: Sequence[str] = ()
        """CSP hashes of the page's own inline scripts."""
        self._token = token
        self._hosts = {host.lower() for host in hosts}
        # Not the token itself. The name differs, too: cookies of one host are shared by all of its ports.
        key = (token or "").encode()
        self._cookie = "traceml-" + hmac.new(key, b"name", "sha256").hexdigest()[:8]
        self._proof = hmac.new(key, b"cookie", "sha256").hexdigest()

    def install(self, server: Flask) -> None:
        """Register with a server before its other handlers, so that refused requests reach none of them."""
        server.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
        server.before_request(self._admit)
        server.after_request(self._harden)
        server.add_url_rule("/login", view_func=self._login, methods=["POST"])

    def _admit(self) -> Response | None:
        """Return the refusal of a request. None: the request may go on."""
        if not is_named(request.headers.get("Host", ""), self._hosts):
            return _refusal(421, "This server is not known by that name.")
        if request.method not in _METHODS:
            return _refusal(405, "This method is not allowed here.", Allow=", ".join(_METHODS))
        origin = request.headers.get("Origin")
        if request.method == "POST" and origin is not None and _split(origin).netloc != request.host:
            return _refusal(403, "This request was made by another page.")
        if (request.method, request.path) in _OPEN:
            return None
        if self._token is None:
            sent = request.method == "GET" and "token" in request.args  # it stays in no address bar
            return _redirect(request.path, _query_without_token()) if sent else None
        return self._identify()

    def _identify(self) -> Response | None:
        """Require the token. A token in the request counts, whatever the cookie has."""
        path, query = request.path, _query_without_token()
        given = request.args.get("token")
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        if given is not None and self._knows(given):
            return self._welcome(path, query) if request.method == "GET" else None
        if given is None and scheme.lower() == "bearer":
            given = bearer.strip()
            if self._knows(given):
                return None
        if given is None and same(request.cookies.get(self._cookie, ""), self._proof):
            return None
        return _ask(_WRONG if given is not None else _ASK, path, query)

    def _login(self) -> Response:
        """Check the token of the form."""
        target = _split(request.args.get("next", "/"))
        if self._knows(request.form.get("token", "")):
            return self._welcome(target.path, target.query)
        return _ask(_WRONG, target.path, target.query)

    def _welcome(self, path: str, query: str) -> Response:
        """
        Set the cookie, and redirect to the URL without the token.

        The cookie is not Strict: a browser does not send a Strict cookie when a person follows a link from
        another site (a chat, a ticket), so each such link would ask for the token again. A POST from another
        site carries no cookie.
        """
        response = _redirect(path, query)
        response.set_cookie(self._cookie, self._proof, httponly=True, samesite="Lax")
        return response

    def _knows(self, given: str) -> bool:
        return self._token is None or same(given, self._token)

    def _harden(self, response: Response) -> Response:
        policy = {**_POLICY, "script-src": " ".join([_POLICY["script-src"], *self.scripts])}
        response.headers["Content-Security-Policy"] = "; ".join(" ".join(rule) for rule in policy.items())
        response.headers.update(_HEADERS)
        response.headers.setdefault("Cache-Control", "no-store")
        return response


def _split(url: str) -> SplitResult:
    """Split a URL; one that is invalid has no parts."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _query_without_token() -> str:
    return urlencode([pair for pair in request.args.items(multi=True) if pair[0] != "token"])


def _here(path: str, query: str) -> str:
    """Return a path on this server. Two leading slashes would lead to another server."""
    return quote("/" + path.lstrip("/")) + (f"?{query}" if query else "")


def _redirect(path: str, query: str) -> Response:
    return cast("Response", redirect(_here(path, query), 303))


def _ask(message: str, path: str, query: str) -> Response:
    if request.path != "/login" and "text/html" not in request.headers.get("Accept", ""):
        return _refusal(401, message, WWW_Authenticate="Bearer")
    form = _FORM.format(message=escape(message), query=escape(urlencode({"next": _here(path, query)})))
    return Response(form, 401, {"WWW-Authenticate": "Bearer"}, mimetype="text/html")


def _refusal(status: int, message: str, **headers: str) -> Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(message + "\n", status, named, mimetype="text/plain")
