"""What looks like a secret, in the arguments of a command and in lines of output: it is written as `***`."""

from __future__ import annotations

import re

HIDDEN = "***"
_NAMES = "key|token|secret|password|passwd|credentials?"
SECRET_NAME = re.compile(rf"({_NAMES})$", re.IGNORECASE)
"""The end of the name of a secret."""
URL_LOGIN = re.compile(r"://[^/@\s]+@")
_ASSIGNED = re.compile(
    rf"""(?P<name>{_NAMES}|authorization)(?P<sign>["']?\s{{0,3}}[=:]\s{{0,3}})"""
    r"""(?:(?:bearer|basic)\s+)?("[^"]*"?|'[^']*'?|[^\s,;&)}\]]+)""",
    re.IGNORECASE,
)
"""`api_key=…`, `"token": "…"`, `Authorization: Bearer …`."""
_KEY = re.compile(r"(?<![\w.-])key\s*:\s*$", re.IGNORECASE)
"""`key: value` alone is no secret: logs are full of keys of dictionaries."""
_OPTION = re.compile(rf"(-[\w.-]{{0,64}}(?:{_NAMES}))\s+(?!-)\S+", re.IGNORECASE)
_ISSUED = re.compile(
    r"\b(?:hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza|eyJ)[\w.-]{12,}"
    r"|(?<=bearer )\S{12,}",
    re.IGNORECASE,
)
"""Tokens that can be known by how they begin."""


def hide_login(text: str) -> str:
    """Return `text` without the login of each URL in it."""
    return URL_LOGIN.sub(f"://{HIDDEN}@", text)


def masked(line: str) -> str:
    """Return a line of output with what looks like a secret hidden: by its name, or by how it begins."""
    line = _ASSIGNED.sub(_hide, line)
    line = _OPTION.sub(rf"\1 {HIDDEN}", line)
    return _ISSUED.sub(HIDDEN, hide_login(line))


def _hide(found: re.Match[str]) -> str:
    head = found["name"] + found["sign"]
    if _KEY.search(found.string, max(0, found.start() - 1), found.end("sign")):
        return found[0]
    return head + HIDDEN
