"""What a person sees on a terminal. Interprets the sequences that `traceml_ray.terminal` sends."""

from __future__ import annotations

import re

from rich.cells import cell_len

_PART = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])|\x1b|([^\x1b])", re.DOTALL)


class TerminalScreen:
    """A terminal of `width` × `height` cells. `modes`: modes that are on (`?25`: the cursor is shown)."""

    def __init__(self, width: int, height: int) -> None:
        self.modes = {"25", "7"}
        self._held = ""
        self.resize(width, height)

    def resize(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._rows, self._other = self._empty(), self._empty()
        self.x = self.y = 0
        self._left = 0, 0
        """Position of the cursor on the other screen."""

    def _empty(self) -> list[list[str]]:
        return [[" "] * self.width for _ in range(self.height)]

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._rows]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def feed(self, sent: str) -> None:
        """Process what is sent. An incomplete sequence waits for its rest."""
        sent, self._held = self._held + sent, ""
        if (open_at := sent.rfind("\x1b")) >= 0 and not re.match(r"\x1b\[\??[0-9;]*[A-Za-z]", sent[open_at:]):
            sent, self._held = sent[:open_at], sent[open_at:]
        for part in _PART.finditer(sent):
            if part[4]:
                self._put(part[4])
            elif part[3]:
                self._obey(part[1] == "?", part[2], part[3])

    def _put(self, char: str) -> None:
        if char == "\n":
            self.y = min(self.y + 1, self.height - 1)
        elif char == "\r":
            self.x = 0
        elif wide := cell_len(char):
            if self.x + wide > self.width and "7" in self.modes:
                self.x, self.y = 0, self.y + 1
            if self.x + wide <= self.width and self.y < self.height:
                self._rows[self.y][self.x : self.x + wide] = [char, *[""] * (wide - 1)]
            self.x += wide

    def _obey(self, private: bool, numbers: str, letter: str) -> None:
        values = [int(number) for number in numbers.split(";") if number]
        if private:
            (self.modes.add if letter == "h" else self.modes.discard)(numbers)
            if numbers == "1049":
                self._rows, self._other = self._other, self._rows
                (self.x, self.y), self._left = self._left, (self.x, self.y)
        elif letter == "H":
            self.y, self.x = (values[0] - 1, values[1] - 1) if values else (0, 0)
        elif letter == "C":
            self.x += values[0]
        elif letter == "J":
            self._rows = self._empty()
        else:
            assert letter == "m", f"unknown sequence {numbers}{letter}"
