"""What looks like a secret, in a command, a message, a line of output: it is written as `***`."""

from __future__ import annotations

import re

HIDDEN = "***"
_NAMES = "key|token|secret|password|passwd|passphrase|credentials?|(?-i:(?<=_)PASS)"
SECRET_NAME = re.compile(rf"({_NAMES})$", re.IGNORECASE)
"""The end of the name of a secret."""
_URL_LOGIN = re.compile(r"""://[^/?#\s"'<>]*@""")
_QUOTED = r"""[bfru]{0,2}(?:"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?)"""
_SEVERAL = r"\[[^\]]*\]?|\{[^}]*\}?"
_WORD = r"(?:[^\s,;&)}\]]|[,;&)}\]](?=\w)(?![\w.-]{1,64}\s?[=:]))+"
"""Without a comma or bracket behind which other text begins."""
_ASSIGNED = re.compile(
    rf"""(?P<name>{_NAMES}|(?P<login>authorization))(?P<sign>\\*["']?\s{{0,3}}[=:]\s{{0,3}})"""
    r"""(?P<value>(?P<escaped>\\+["']).*?(?P=escaped)"""
    rf"""|{_QUOTED}|{_SEVERAL}|(?(login)(?:[\w-]+\s+)?|(?:(?:bearer|basic)\s+)?){_WORD})""",
    re.IGNORECASE,
)
"""`api_key=…`, `"token": "…"`, `Authorization: Bearer …`."""
_KEY = re.compile(r"(?<![\w.-])(?<!(?:api|ess|ret|ate) )key\s*:\s*$", re.IGNORECASE)
"""`key: value` alone is no secret: logs are full of keys of dictionaries. An API key, a private one, is."""
_OPEN = re.compile(r"none|null|true|false|[\"']{2}", re.IGNORECASE)
"""Says whether there is a secret."""
_OPTION = re.compile(rf"(-[\w.-]{{0,64}}(?:{_NAMES}))\s+(?!-)(?:{_QUOTED}|\S+)", re.IGNORECASE)
_SIGNED = re.compile(r"""([?&](?:x-\w+-)?sig(?:nature)?=)[^\s&"']+""", re.IGNORECASE)
"""What makes a URL a key."""
_ISSUED = re.compile(
    r"\b(?:hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza|eyJ|npm_|nvapi-|pypi-|ya29\.)[\w.-]{12,}"
    r"|\b(?-i:SG\.|hvs\.)[\w.-]{12,}"
    r"|(?<=bearer )\S{12,}",
    re.IGNORECASE,
)
"""Tokens that can be known by how they begin."""


def masked(line: str) -> str:
    """Return a line of output with what looks like a secret hidden: by its name, or by how it begins."""
    line = _ASSIGNED.sub(_hide, line)
    line = _OPTION.sub(rf"\1 {HIDDEN}", line)
    line = _SIGNED.sub(rf"\1{HIDDEN}", line)
    line = _URL_LOGIN.sub(f"://{HIDDEN}@", line)
    return _ISSUED.sub(HIDDEN, line)


def masked_text(text: str) -> str:
    """Return several lines (a message, a traceback), each of them `masked`."""
    return "\n".join(map(masked, text.split("\n")))


def _hide(found: re.Match[str]) -> str:
    if _KEY.search(found.string, max(0, found.start() - 1), found.end("sign")):
        return found[0]
    if _OPEN.fullmatch(found["value"]):
        return found[0]
    return found["name"] + found["sign"] + HIDDEN
