r"""
The only formatter: numbers, units, shares, bytes, durations and lists of ranks as people read them. What
looks like a secret, in a command, a message, a line of output, is written as `***`.

Three things tell a secret: the name before it (`api_key=…`, `--password …`, `Cookie: …`), how it begins
(`hf_…`, a JSON web token), and where it stands (the login of a URL, `curl -u`, the lines of a private key).
A name is judged by its words, so that `pad_token`, `monkey` and `forward_pass` are none of a secret.

Results are printed on stdout (`show`), messages on stderr (`say`), and there on a terminal how far long work
is (`progress_bar`). All else of the program prints by these. Names, messages and lines of output come from
files that anybody may have written. What a terminal would take for an order (a title, a colour, where to
write, which way text runs) is written out, as `\u001b`. In a text that is JSON that is the same character.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timezone, tzinfo
from typing import Any, NoReturn, TextIO
from urllib.parse import urlsplit, urlunsplit

NA = "n/a"
MOMENT = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:\+00:00|Z))")
"""Pattern of a moment (ISO 8601) in a sentence."""
_LISTED = 8
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ASCII = str.maketrans("│─├┤┌┐└┘…·×÷≈−–—←→▲△◆●✓○█▓▒░▚↑↓°▁▂▃▄▅▆▇", "|-++++++.:x/~---<>^?!o*o#%+=&^v _.,-~=*")


def number(
    value: float | None,
    digits: int | None = None,
    *,
    figures: int = 3,
    sign: bool = False,
    aligned: bool = False,
) -> str:
    """
    Return `value` with `figures` significant figures ("1,204", "41.3", "0.25", "4") and at most two decimals,
    or with `digits` decimals; "n/a" if it is not known. `aligned` keeps trailing zeros, for a column of
    numbers. `sign` writes a plus.
    """
    if value is None or value != value:
        return NA
    if digits is None:
        decimals = figures - 1 - math.floor(math.log10(abs(value))) if value else figures - 1
        text = f"{value:{'+' if sign else ''},.{min(max(decimals, 0), 2)}f}"
        text = text.rstrip("0").rstrip(".") if "." in text and not aligned else text
    else:
        text = f"{value:{'+' if sign else ''},.{digits}f}"
    if not text.strip("+-0."):  # what is rounded to nothing has no sign
        text = text.lstrip("+-")
    return text.replace("-", "−")


def value(number: float | None) -> str:
    """Return a number of any unit and size with four significant figures: "0.4213", "3e−05", "nan"."""
    return NA if number is None else f"{number:,.4g}".replace("-", "−")


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(
    values: Sequence[float | None], most: int = 24, between: tuple[float, float] | None = None
) -> str:
    """
    Return values as at most `most` bars. If there are more values, each bar is the mean of neighbouring
    values. The lowest and highest bar are the ends of the scale `between`; None: the smallest and largest
    value. Unknown values are gaps. Empty if fewer than two values are known.
    """
    finite = [one if one is not None and math.isfinite(one) else None for one in values]
    count = min(most, len(finite))
    parts = [finite[len(finite) * n // count : len(finite) * (n + 1) // count] for n in range(count)]
    known = [[one for one in part if one is not None] for part in parts]
    means = [sum(part) / len(part) if part else None for part in known]
    there = [mean for mean in means if mean is not None]
    if len(there) < 2:
        return ""
    low, high = between or (min(there), max(there))
    top, span = len(_BARS) - 1, (high - low) or 1.0
    return "".join(
        " " if mean is None else _BARS[round(top * min(1.0, max(0.0, (mean - low) / span)))] for mean in means
    )


def unit(value: float | None, name: str, digits: int | None = None) -> str:
    """Return "41.3 W"."""
    return NA if value is None else f"{number(value, digits)} {name}"


def ms(value: float | None) -> str:
    """Return milliseconds as "41.3 ms"."""
    return unit(value, "ms")


def ns(value: float) -> str:
    """Return nanoseconds as "41.3 ms"."""
    return ms(value / 1e6)


def percent(value: float | None, *, sign: bool = False) -> str:
    """Return a percentage as "28 %" or "6.1 %", with `sign` as "+28 %"."""
    return NA if value is None else f"{number(value, figures=2, sign=sign)} %"


def times(value: float | None) -> str:
    """Return a ratio: "1.62×"."""
    return NA if value is None or value != value else f"{value:.2f}×"


def share(value: float | None) -> str:
    """Return a share, 0..1, as "28 %"."""
    return NA if value is None else percent(100 * value)


def size(value: float | None, per: str = "") -> str:
    """Return bytes as "3.2 GB"; `per` is "/s" for a rate."""
    if value is None:
        return NA
    for name in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or name == "TB":
            break
        value /= 1000
    return f"{number(value, 0 if name == 'B' else None)} {name}{per}"


def flops(value: float | None) -> str:
    """Return a number of floating-point operations as "3.2 TFLOPs"."""
    if value is None:
        return NA
    for name in ("", "k", "M", "G", "T", "P", "E"):
        if abs(value) < 999.5 or name == "E":
            break
        value /= 1000
    return f"{number(value)} {name}FLOPs"


def duration(seconds: float | None) -> str:
    """Return seconds as "0.4 s", "41 s", "16 min", "3.2 h" or "4 d"."""
    if seconds is None:
        return NA
    for name, least, factor in (("s", 120, 60), ("min", 120, 60), ("h", 48, 24)):
        if seconds < least:
            return f"{number(seconds, figures=2)} {name}"
        seconds /= factor
    return f"{number(seconds, figures=2)} d"


def age(seconds: float | None) -> str:
    """Return how old something is, to the second: "0 s", "41 s", "16 min"."""
    return NA if seconds is None else duration(round(seconds))


TIMEZONE: ContextVar[tzinfo | None] = ContextVar("timezone", default=None)
"""Timezone in which moments are written; None: the timezone of this process."""


def local(moment: str) -> datetime:
    """Return a moment (ISO 8601, UTC) in the timezone of the reader. Raises ValueError for invalid text."""
    return datetime.fromisoformat(f"{moment[:19]}+00:00").astimezone(TIMEZONE.get())


def zone(moment: str | None = None) -> str:
    """Return the abbreviation of the timezone at a moment, by default now: "CET", "UTC+03"."""
    try:
        when = local(moment) if moment else datetime.now(timezone.utc).astimezone(TIMEZONE.get())
    except (ValueError, OverflowError):
        return "UTC"  # as `date` writes what is no moment
    name = when.tzname() or ""
    return f"UTC{name}" if name[:1] in "+-" else name


def clock(moment: str | None) -> str:
    """Return a moment (ISO 8601, UTC) as "22:13:25", in the timezone of the reader."""
    return NA if moment is None else date(moment)[11:]


def with_clocks(sentence: str) -> str:
    """Return a sentence with its moments as "22:13:25 CET"."""
    return MOMENT.sub(lambda match: f"{clock(match[0])} {zone(match[0])}", sentence)


def date(moment: str | None) -> str:
    """Return a moment (ISO 8601, UTC) as "2023-11-14 22:13:25", in the timezone of the reader."""
    if moment is None:
        return NA
    try:
        return f"{local(moment):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError):  # a file says what it likes
        return moment[:19].replace("T", " ")


def dated(moment: str | None) -> str:
    """Return a moment with its timezone: "2023-11-14 22:13:25 CET"."""
    return NA if moment is None else with_dates(moment)


def with_dates(sentence: str) -> str:
    """Return a sentence with its moments (ISO 8601, UTC) as "2023-11-14 22:13:25 CET"."""
    return MOMENT.sub(lambda match: f"{date(match[0])} {zone(match[0])}", sentence)


def count(amount: int, noun: str) -> str:
    """Return "1 rank", "1,024 ranks"."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def plain(value: object) -> str:
    """Return a word or an integer as it is, None and "" as "n/a"."""
    return NA if value in (None, "") else f"{value:,}" if isinstance(value, int) else str(value)


def words(name: str) -> str:
    """Return an identifier as words: "co_critical" → "co critical"."""
    return name.replace("_", " ")


def listed(items: Sequence[str], more: int = 0) -> str:
    """
    Return "a", "a and b", "a, b and c". If there are more than eight items, or `more`, the text ends with the
    number of the others.
    """
    more += max(len(items) - _LISTED, 0)
    items = [*items[:_LISTED], *[f"{more:,} more"] * (more > 0)]
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def ranks(numbers: Iterable[int], total: int = 0) -> str:
    """Return "rank 5", "ranks 0, 4-7 and 9"; "" for none. Of `total` ranks, `numbers` may be only some."""
    runs = [part for run in _runs(numbers) for part in ([run[:1], run[1:]] if len(run) == 2 else [run])]
    total = max(total, sum(map(len, runs)))
    more = total - sum(map(len, runs[:_LISTED]))
    return f"rank{'s' * (total > 1)} {listed([*map(_run, runs[:_LISTED])], more)}" if total else ""


def ranges(numbers: Iterable[int]) -> str:
    """Return "0-1, 4-7, 9", the form used in tables."""
    return ", ".join(map(_run, _runs(numbers)))


def _runs(numbers: Iterable[int]) -> list[range]:
    """Return the sorted numbers as ranges without gaps."""
    runs: list[range] = []
    for value in sorted(set(numbers)):
        if runs and value == runs[-1].stop:
            runs[-1] = range(runs[-1].start, value + 1)
        else:
            runs.append(range(value, value + 1))
    return runs


def _run(run: range) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def one_line(text: object) -> str:
    r"""
    Return `text` with the characters that a terminal cannot show (line breaks, escapes, surrogates, changes
    of text direction) escaped as in JSON, such as `\n` and `\u001b`.
    """
    line = str(text)
    return line if line.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in line)


def visible(text: str) -> str:
    """Return text of several lines, each escaped as by `one_line`."""
    return "\n".join(map(one_line, text.split("\n")))


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    parts = (units[index : index + 2].hex() for index in range(0, len(units), 2))
    return _SHORT.get(char) or "".join(f"\\u{part}" for part in parts)


def in_ascii(text: str) -> str:
    """Return `text` for a terminal or a file that supports only ASCII, with the same length."""
    return text.translate(_ASCII).encode("ascii", "replace").decode()


SAVE_CURSOR, RESTORE_CURSOR = "\x1b7", "\x1b8"
"""Escape sequences that save and restore the position and colours of a terminal's cursor."""
LEAVE_PANEL = f"{SAVE_CURSOR}\x1b[r{RESTORE_CURSOR}\x1b[m\x1b[J"
"""Escape sequence that ends a panel below a job's output: all lines scroll again, those below are empty."""


@functools.lru_cache(4096)
def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key for names in which node-2 comes before node-10."""
    return tuple(
        (0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)
    )


HIDDEN = "***"


def _of(words: str) -> frozenset[str]:
    return frozenset(words.split())


_SURE = _of(
    "password passwd passphrase passcode pwd secret secrets credential credentials authorization cookie jwt "
    "apikey apitoken authtoken accesstoken accesskey secretkey privatekey clientsecret"
)
"""Last words of a name that is one of a secret, whatever comes before."""
_UNSURE = _of("key token pass auth")
"""Last words of a name that may be a secret. Another sign is needed to decide."""
_TOKENIZER = _of(
    "pad padding eos bos unk unknown sep separator cls mask boi eoi eot eom fim image images img video audio "
    "vision speech text word special start begin end stop first last next prev previous max min num total "
    "avg mean per each new decoder encoder forced additional extra added prefix middle suffix assistant "
    "system tool vocab target predicted sampled generated sentinel row col frame patch dummy placeholder"
)
"""A token with one of these words is a tokenizer's, or counted."""
_KEYS = _of(
    "api access secret private account license licence auth authentication ssh encryption decryption signing "
    "service master shared storage subscription client deploy session hmac aes rsa ssl tls wandb openai "
    "anthropic aws azure gcp google github slack comet neptune datadog sentry stripe"
)
"""What a secret key is of; other keys are those of dictionaries, tables, caches."""
_ACCOUNTS = _of("db database smtp mysql pg postgres redis user ftp ssh root admin")
"""Words before `pass` that make it a password."""
_FLAGS = _of("use no with without skip disable enable require has is ask show")
"""First words of an option that has no secret: `--use-auth-token`."""
_HINT = re.compile("key|token|secret|pass|pwd|auth|cookie|credential|jwt", re.IGNORECASE)
"""Pattern that every name of a secret contains. Most lines do not match, and are not examined further."""
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_LAST = "key|token|secrets?|pass(?:word|wd|phrase|code)?|pwd|credentials?|auth|jwt"
_IDENTIFIER = re.compile(r"(?:\b(?:api|access|secret|private|license|account) )?[\w.-]*\Z", re.IGNORECASE)
"""What a name is, before its end; the `API` of `API key: …`."""
_NAME_CHARS = 64

_QUOTED = r"""[bfru]{0,2}(?:"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?)"""
_SEVERAL = r"\[[^\]]*\]?|\{[^}]*\}?"
_WORD = r"(?:[^\s,;&)}\]]|[,;&)}\]](?=\w)(?![\w.-]{1,64}\s?[=:]))+"
"""Without a comma or bracket behind which other text begins."""
_REST = r"""[^\r\n"']+"""
"""Pattern of the rest of a line: the value of a header may be several words."""
_ASSIGNED = re.compile(
    rf"""(?:(?P<cookie>cookie)|(?P<login>authorization)|(?:{_LAST}))(?P<sign>\\*["']?\s{{0,3}}[=:]\s{{0,3}})"""
    r"""(?P<value>(?P<escaped>\\+["']).*?(?P=escaped)"""
    rf"""|{_QUOTED}|{_SEVERAL}|(?(cookie){_REST}|(?(login)(?:(?:digest|oauth|signature|aws4[\w-]+)\s[^\r\n]+"""
    rf"""|(?:[\w-]+\s+)?{_WORD})|(?:(?:bearer|basic)\s+)?{_WORD})))""",
    re.IGNORECASE,
)
"""`api_key=…`, `"token": "…"`, `Authorization: Bearer …`, `Cookie: a=…; b=…`."""
_OPTION = re.compile(
    rf"(?P<name>-(?<![\w-]-)-?[A-Za-z][\w.-]{{0,63}})(?P<sign>\s+)(?!-)(?P<value>{_QUOTED}|\S+)"
)
"""`--password …`."""
_PAIR = re.compile(
    rf"""(?P<open>\(\s?[bru]?["']|["']-{{1,2}})(?P<name>[\w.-]{{1,64}})(?P<sign>["'],\s?)(?P<value>{_QUOTED})"""
)
"""`('api_key', '…')`, and an option and its value in a list of arguments."""
_OPEN = re.compile(r"none|null|true|false|[\"']{2}|[\"']?\*{3,}[\"']?", re.IGNORECASE)
"""Says whether there is a secret."""
_NO_PASSWORD = re.compile(r"[\d.:,x-]+|[.~].*|.*/.*")
"""Pattern of values of `-p` that are no password: a number, ports, a path."""
_NO_TOKEN = re.compile(r"""["']?(?:[-+]?\d{1,9}(?:\.\d*)?(?:e[-+]?\d+)?|<\S*>)["']?""", re.IGNORECASE)
"""Pattern of values that are no secret token: a number, `</s>`."""
_RANDOM = re.compile(r"""["']?(?=[^\d"']*\d)(?=[^a-z"']*[a-z])[A-Za-z0-9+/=]{20,}["']?""", re.IGNORECASE)
_URL_LOGIN = re.compile(r"""://[^/?#\s"'<>@]*@(?:[^/?#\s"'<>@]*@)*""")
_SIGNED = re.compile(
    r"""([?&](?:(?:x-\w+-)?sig(?:nature)?|x-\w+-(?:credential|security-token)|key)=)[^\s&"']+""",
    re.IGNORECASE,
)
"""What makes a URL a key."""
_USER = re.compile(r"""(?<!\S)(-u|--(?:proxy-)?user)([ =]?["']?[^\s:"'=]{1,64}:)(?!\d+(?!\S))[^\s"']+""")
"""`curl -u name:password`; two numbers are a user and a group."""
_BY_PROGRAM = re.compile(
    r"(\b(?:(?:sshpass|(?:docker|podman|helm|az|oc) login|mongo(?:sh|dump|restore)?)\b"
    r"(?:(?!\s-p).){0,200}\s-p\s?|(?:mysql|mariadb)[\w-]*\b(?:(?!\s-p).){0,200}\s-p(?=\S)"
    r"|redis-cli\b(?:(?!\s-a).){0,200}\s-a\s?|wandb login\s+(?!-)))"
    rf"(?:{_QUOTED}|\S+)"
)
"""Programs that are known to take a password as `-p`: to others it is a port, a path, a prompt."""
_ISSUED = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-(?=[\w-]{0,64}\d)[\w-]{16,}|[srp]k_(?:live|test)_\w{8,}|gh[oprsu]_[A-Za-z0-9]{16,}"
    r"|github_pat_\w{20,}|gl[a-z]{2,4}-[\w-]{20,}|xox[abeprs]-[\w-]{10,}|xapp-[\w-]{10,}|A(?:KI|SI)A[A-Z0-9]{12,}"
    r"|AIza[\w-]{30,}|ya29\.[\w-]{12,}|eyJ[\w-]{12,}(?:\.[\w.-]+)?|npm_[A-Za-z0-9]{20,}|nvapi-[\w-]{20,}|pypi-AgE[\w-]{12,}"
    r"|SG\.[\w.-]{16,}|hvs\.[\w-]{12,}|dapi[0-9a-f]{32}|r8_[A-Za-z0-9]{30,}|wandb_v1_\w{20,}|dop_v1_[0-9a-f]{32,})"
    r"|(?<=hooks\.slack\.com/services/)[\w/]+"
    r"|(?<=[Bb]earer )(?=\S*\d)\S{12,}"
)
"""Tokens that can be known by how they begin."""
_MAY_BE_ISSUED = re.compile(
    "hf_|[srp]k[-_]|gh[oprsu]_|github_pat_|gl[a-z]{2,4}-|xox|xapp-|A[KS]IA|AIza|ya29|eyJ|npm_|nvapi-|pypi-A|SG[.]"
    "|hvs[.]|dapi|r8_|wandb_v1|dop_v1|hooks[.]slack|[Bb]earer "
)
"""How they begin: found sooner than they are."""
_BEGINS = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_ENDS = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY")
_KEY_INSIDE = re.compile(rf"({_BEGINS.pattern})(?:\\[nr]|[A-Za-z0-9+/= ])+")
"""A private key in one line."""
_KEY_LINE = re.compile(
    r"""(?:\[[\w:. -]{0,40}\]:?)?[\s"'>|]*"""
    r"""(?:[A-Za-z0-9+/=]+|[A-Za-z-]+: ?[\w,-]+)?(?:\\[nr])*["',\s\\]*"""
)
"""What is between the first and the last line of one: base64, a header, nothing."""
_LONE = re.compile(r"\s*[A-Za-z0-9+/]{64,76}={0,2}\s*")
"""A line of one whose first line is not known, if it is"""
_MIXED = re.compile(r"(?=.*[a-z])(?=.*[A-Z]).*\d")
"""Pattern of a word with small letters, capitals and digits. A digest has no capitals."""


class Masker:
    """Masks consecutive lines of a text. All lines of a private key are masked."""

    def __init__(self) -> None:
        self._inside = False
        """Whether the last line was part of a private key."""

    def hide_keys(self, lines: Sequence[str]) -> Sequence[str]:
        """Return the next lines, with the lines of a private key hidden."""
        if not self._inside and not any("PRIVATE KEY" in line for line in lines):
            return lines
        return [*map(self._hide_key, lines)]

    def unfinished(self, line: str) -> str:
        """Return the incomplete last line, hidden if it is inside a private key."""
        inside = self._inside and (_ENDS.search(line) or _KEY_LINE.fullmatch(line))
        return HIDDEN if inside and line else line

    def _hide_key(self, line: str) -> str:
        if not self._inside:
            begun = _BEGINS.search(line)
            self._inside = begun is not None and not _ENDS.search(line, begun.end())
            return line
        hidden = self.unfinished(line)
        self._inside = (hidden is not line or not line) and not _ENDS.search(line)
        return hidden


def masked(line: str) -> str:
    """Return a line of output with everything that looks like a secret hidden."""
    if _HINT.search(line):
        line = _ASSIGNED.sub(_hide_assigned, line)
        line = _OPTION.sub(_hide_option, line)
        if "'," in line or '",' in line:
            line = _PAIR.sub(_hide_pair, line)
    if "://" in line:
        line = _SIGNED.sub(rf"\1{HIDDEN}", line)
        line = _URL_LOGIN.sub(f"://{HIDDEN}@", line)
    elif "sig" in line:
        line = _SIGNED.sub(rf"\1{HIDDEN}", line)
    if "-----BEGIN " in line:
        line = _KEY_INSIDE.sub(rf"\1{HIDDEN}", line)
    if " -" in line:
        line = _USER.sub(rf"\1\2{HIDDEN}", line)
        line = _BY_PROGRAM.sub(rf"\1{HIDDEN}", line)
    if _LONE.fullmatch(line) and _MIXED.match(line):
        return HIDDEN
    return _ISSUED.sub(HIDDEN, line) if _MAY_BE_ISSUED.search(line) else line


def masked_command(words: Sequence[str]) -> list[str]:
    """
    Return the words of a command line without the secrets in them.

    The word after `-p` is hidden too, unless it is a number, ports, or a path. Any other word may be a
    password, and a command is stored with a session that may be passed on.
    """
    shown, option = [], ""
    for word in words:
        name, sign, value = word.partition("=")
        is_option = word.startswith("-")
        if option and not is_option and _follows(option, word):
            word = HIDDEN
        elif sign and _is_secret(name.lstrip("-"), value, _is_auth(name)):
            word = f"{name}={HIDDEN}"
        option = name if is_option and not sign and not _is_flag(name) else ""
        shown.append(masked(word))
    return shown


def _follows(option: str, word: str) -> bool:
    """Return whether the word after an option is a secret."""
    if option == "-p":
        return _NO_PASSWORD.fullmatch(word) is None
    return _is_secret(option.lstrip("-"), word, _is_auth(option))


def masked_text(text: str) -> str:
    """Return a text of several lines (a message, a traceback) with each line `masked`."""
    return "\n".join(map(masked, Masker().hide_keys(text.split("\n"))))


def without_login(url: str) -> str:
    """Return a URL without user, password and query, which may hold a token. A path stays as it is."""
    parts = urlsplit(url)
    if not parts.netloc:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def names_secret(name: str) -> bool | None:
    """Return whether a value with this name is a secret; None if the value must decide."""
    words = [word.lower() for word in _WORDS.findall(name[-_NAME_CHARS:])] or [""]
    *before, last = words
    if last in _SURE:
        return True
    if last not in _UNSURE or not _TOKENIZER.isdisjoint(before if last == "token" else ()):
        return False
    if last == "token" or (name.isupper() and before):  # of the environment
        return True
    if last == "pass":
        return bool(before) and before[-1] in _ACCOUNTS
    return True if last == "key" and before and before[-1] in _KEYS else None


def _is_secret(name: str, value: str, unsure: bool = False) -> bool:
    """Return whether a value must be hidden. `unsure`: a name that needs another sign counts as a secret."""
    sure = names_secret(name)
    if sure is None:
        sure = unsure or _RANDOM.fullmatch(value) is not None
    if not sure or _OPEN.fullmatch(value):
        return False
    last = name.lower()[-5:]
    if last.endswith("pwd"):
        return not value.startswith(("/", "~"))  # of a shell: its folder
    return not (last.endswith(("token", "auth", "key")) and _NO_TOKEN.fullmatch(value))


def _hide_assigned(match: re.Match[str]) -> str:
    end = match.start("sign")
    before = match.string[max(0, end - _NAME_CHARS) : end]
    name = _IDENTIFIER.search(before)
    assert name is not None  # it may be empty
    auth = match[0][:4].lower() == "auth" and "=" in match["sign"]
    return _hidden(match, name[0], unsure=auth)


def _hide_option(match: re.Match[str]) -> str:
    name = match["name"]
    return match[0] if _is_flag(name) else _hidden(match, name.lstrip("-"), unsure=_is_auth(name))


def _is_flag(option: str) -> bool:
    return re.split("[-_]", option.lstrip("-").lower())[0] in _FLAGS


def _is_auth(name: str) -> bool:
    return name.lower().endswith("auth")


def _hide_pair(match: re.Match[str]) -> str:
    option = match["open"].endswith("-")
    alone = option or match.string[match.end() :].lstrip().startswith(")")
    return _hidden(match, match["name"], unsure=option) if alone else match[0]


def _hidden(match: re.Match[str], name: str, unsure: bool) -> str:
    """Return the matched text with its value hidden, if the value is a secret."""
    if not _is_secret(name, match["value"], unsure):
        return match[0]
    return match[0][: match.start("value") - match.start()] + HIDDEN


_END_S = 1.0


def show(text: object, *, end: str = "\n", file: TextIO | None = None) -> None:
    """Print text of any number of lines on stdout, or on `file`. Raises OSError (a pipe that is closed)."""
    print(visible(str(text)), end=end, file=file, flush=True)


def log(message: object) -> None:
    """Print one line on stderr, if the process has a stderr."""
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        if sys.stderr is not None:
            print(f"traceml-ray: {one_line(message)}", file=sys.stderr, flush=True)


def exit_now(code: int) -> NoReturn:
    """
    End this process now, after writing out everything that was printed.

    The usual end of Python ends threads wherever they are. A thread that is in C++ code then, such as a call
    of Ray, aborts the process: exit code -6 instead of `code`.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(code)


def exit_soon(code: int) -> None:
    """End this process within a second. Without its cluster, Ray's own shutdown takes minutes."""
    timer = threading.Timer(_END_S, os._exit, (code,))
    timer.daemon = True
    timer.start()


AFTER_S = 1.0
"""Time after which work shows its progress, in s. Shorter work leaves the terminal unchanged."""

Progress = Callable[[str, "float | None"], object]
"""
Function that receives a description of the work, and the share of it that is done (0..1;
None: not known).
"""


@contextmanager
def progress_bar(what: str, after_s: float = AFTER_S) -> Iterator[Progress]:
    """
    Show the progress of `what` until the block ends. Inside another `progress_bar`, the
    outer bar shows it.
    """
    outer = _BAR.get()
    if outer is not None:
        outer.advance(what, None)
        yield outer.advance
        return
    if not _is_terminal():
        yield lambda *_: None
        return
    bar = _Bar(what)
    timer = threading.Timer(after_s, bar.start)
    timer.daemon = True
    token = _BAR.set(bar)
    timer.start()
    try:
        yield bar.advance
    finally:
        _BAR.reset(token)
        timer.cancel()
        bar.stop()


def advance(what: str, share: float | None) -> None:
    """Report the progress of work that somebody may wait for, see `Progress`."""
    bar = _BAR.get()
    if bar is not None:
        bar.advance(what, share)


def _is_terminal() -> bool:
    stderr = sys.stderr  # None in a process without one
    return stderr is not None and stderr.isatty() and os.environ.get("TERM") != "dumb"


class _Bar:
    """
    A progress bar on the terminal. The timer's thread calls `start`; the working thread calls everything
    else.
    """

    def __init__(self, what: str) -> None:
        self._at: tuple[str, float | None] = one_line(what), None
        self._lock = threading.Lock()
        self._ended = False
        self._drawn: Any = None

    def start(self) -> None:
        """Show the bar from now on."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        text = TextColumn("{task.description}", markup=False)
        drawn = Progress(
            *(text, BarColumn(), TimeElapsedColumn()),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with self._lock:
            if not self._ended:
                drawn.add_task(self._at[0], total=1.0)
                drawn.start()
                self._drawn = drawn
                self._update()

    def advance(self, what: str, share: float | None) -> None:
        """See `Progress`."""
        with self._lock:
            self._at = one_line(what), share
            self._update()

    def stop(self) -> None:
        """Remove the bar from the terminal."""
        with self._lock:
            self._ended = True
            if self._drawn is not None:
                self._drawn.stop()

    def _update(self) -> None:
        if self._drawn is not None:
            what, share = self._at
            total = None if share is None else 1.0
            self._drawn.update(self._drawn.task_ids[0], description=what, total=total, completed=share or 0.0)


_BAR: ContextVar[_Bar | None] = ContextVar("bar", default=None)
