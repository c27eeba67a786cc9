"""Requests that follow no redirect."""

from __future__ import annotations

from urllib.request import HTTPRedirectHandler


class NoRedirect(HTTPRedirectHandler):
    """A redirected request would carry its token to another place, and a POST would lose its body."""

    def redirect_request(self, *_: object) -> None:
        """Follow none."""
