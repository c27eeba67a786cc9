"""Bytes of a terminal as keys, and what a key changes in what is shown."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from .snapshot import PANES, SORTS, Choice

_LETTERS = {"A": "up", "B": "down", "C": "right", "D": "left", "H": "home", "F": "end", "Z": "back_tab"}
_NUMBERS = {"1": "home", "4": "end", "5": "page_up", "6": "page_down", "7": "home", "8": "end"}
_SEQUENCES = {**_LETTERS, **_NUMBERS}
"""By the letter at its end, or by its number where that is `~`."""
_SINGLE = {"\t": "tab", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace", " ": "space"}
_SEQUENCE = re.compile(r"\x1b(?:O|\[([0-9;?]*))([A-Za-z~])")
_UNFINISHED = re.compile(r"\x1b(?:O|\[[0-9;?]*)\Z")
_MOST = 64
"""Characters of a sequence that does not end: it is none."""
_DIGITS = 7


class Keys:
    """Bytes as they come, any number at a time."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        """Return the keys in what was typed: a character, or a name as `page_up`; others are left out."""
        typed, self._rest = self._rest + data.decode("ascii", "ignore"), ""
        names, position = [], 0
        while position < len(typed):
            sequence = _SEQUENCE.match(typed, position)
            if sequence:
                name = _SEQUENCES.get((sequence[1] or "") if sequence[2] == "~" else sequence[2], "")
                position = sequence.end()
            elif _UNFINISHED.match(typed, position) and len(typed) - position < _MOST:
                self._rest, position, name = typed[position:], len(typed), ""
            else:
                single = typed[position]
                name = "escape" if single == "\x1b" else _SINGLE.get(single, single)
                position += 1
            names += [name] if name and name.isprintable() else []
        return names


@dataclass(frozen=True)
class Control:
    """What a person has chosen so far."""

    choice: Choice = field(default_factory=Choice)
    typed: str | None = None
    """The rank that is being typed; None: none is asked for."""
    paused: bool = False
    quit: bool = False


def press(control: Control, key: str, page: int) -> Control:
    """Return what is chosen after a key; `page` is how many lines a page has."""
    choice = control.choice
    if control.typed is not None:
        return _type(control, key)
    if key in ("q", "Q"):
        return replace(control, quit=True)
    if key in ("p", "space"):
        return replace(control, paused=not control.paused)
    if key == "r":
        return replace(control, typed="")
    if key == "s":
        following = SORTS[(SORTS.index(choice.sort) + 1) % len(SORTS)]
        return replace(control, choice=replace(choice, sort=following, scroll=0))
    if key in ("?", "h"):
        pane = PANES[0] if choice.pane == "help" else "help"
        return replace(control, choice=replace(choice, pane=pane, rank=None, scroll=0))
    return replace(control, choice=_moved(choice, key, page))


def _type(control: Control, key: str) -> Control:
    """Take a key of the rank that is asked for."""
    typed = control.typed or ""
    if key == "enter":
        rank = int(typed) if typed else None
        return replace(control, typed=None, choice=replace(control.choice, rank=rank, scroll=0))
    if key in ("escape", "q"):
        return replace(control, typed=None)
    if key == "backspace":
        return replace(control, typed=typed[:-1])
    return replace(control, typed=(typed + key)[:_DIGITS]) if key.isdecimal() else control


def _moved(choice: Choice, key: str, page: int) -> Choice:
    """Return the pane and the lines that are shown after a key."""
    lines = {"up": -1, "k": -1, "down": 1, "j": 1, "page_up": -page, "page_down": page}
    if key in lines:
        return replace(choice, scroll=max(0, choice.scroll + lines[key]))
    if key == "home":
        return replace(choice, scroll=0)
    if key == "escape" and (choice.rank is not None or choice.pane == "help"):
        return replace(choice, rank=None, pane=PANES[0] if choice.pane == "help" else choice.pane, scroll=0)
    index = PANES.index(choice.pane) if choice.pane in PANES else 0
    steps = {"tab": 1, "right": 1, "back_tab": -1, "left": -1}
    if key in steps:
        index += steps[key]
    elif key.isdecimal() and 1 <= int(key) <= len(PANES):
        index = int(key) - 1
    else:
        return choice
    return replace(choice, pane=PANES[index % len(PANES)], rank=None, scroll=0)
