"""A terminal that scrolls: shows what a person sees of output and of a panel drawn beneath it."""

from __future__ import annotations

import re

_PART = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])|\x1b([78D])|([^\x1b])", re.DOTALL)
_WHOLE = re.compile(r"\x1b(\[\??[0-9;]*[A-Za-z]|[78D])")


class ScrolledTerminal:
    """A terminal of `width` × `height` cells. `gone`: lines that have scrolled off the top."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.rows = [[" "] * width for _ in range(height)]
        self.gone: list[str] = []
        self.x = self.y = 0
        self.first, self.last = 0, height - 1
        """First and last line of the scroll region."""
        self._saved = 0, 0
        self._held = ""

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.rows]

    def resize(self, width: int, height: int) -> None:
        """
        Resize: lines are added or removed at the bottom, but the cursor's line stays. Then all
        lines scroll.
        """
        blank = [[" "] * self.width for _ in range(max(0, height - self.height))]
        rows = self.rows + blank
        while len(rows) > height and self.y >= height:
            self.gone.append("".join(rows.pop(0)).rstrip())
            self.y -= 1
        self.rows = [(row + [" "] * width)[:width] for row in rows[:height]]
        self.width, self.height, self.x = width, height, min(self.x, width - 1)
        self.first, self.last = 0, height - 1

    def feed(self, sent: str) -> None:
        sent, self._held = self._held + sent, ""
        if (open_at := sent.rfind("\x1b")) >= 0 and not _WHOLE.match(sent, open_at):
            sent, self._held = sent[:open_at], sent[open_at:]
        for part in _PART.finditer(sent):
            private, numbers, letter, short, char = part.groups()
            if char:
                self._put(char)
            elif short:
                self._short(short)
            elif not private:
                self._obey([int(number) for number in numbers.split(";") if number], letter)

    def _put(self, char: str) -> None:
        if char == "\n":
            self._down()
        elif char == "\r":
            self.x = 0
        elif char.isprintable():
            if self.x == self.width:
                self.x = 0
                self._down()
            self.rows[self.y][self.x] = char
            self.x += 1

    def _down(self) -> None:
        if self.y == self.last:
            row = self.rows.pop(self.first)
            self.rows.insert(self.last, [" "] * self.width)
            if self.first == 0:
                self.gone.append("".join(row).rstrip())
        else:
            self.y = min(self.y + 1, self.height - 1)

    def _short(self, char: str) -> None:
        if char == "7":
            self._saved = self.x, self.y
        elif char == "8":
            self.x, self.y = self._saved
        else:
            self._down()

    def _obey(self, values: list[int], letter: str) -> None:
        value = values[0] if values else 0
        if letter == "A":
            self.y = max(self.first if self.y >= self.first else 0, self.y - (value or 1))
        elif letter == "C":
            self.x = min(self.width - 1, self.x + (value or 1))
        elif letter == "H":
            self.y, self.x = (value or 1) - 1, (values[1] if len(values) > 1 else 1) - 1
        elif letter == "r":
            self.first, self.last = (value or 1) - 1, (values[1] if len(values) > 1 else self.height) - 1
            self.x = self.y = 0
        elif letter == "K":
            self.rows[self.y][0 if value else self.x :] = [" "] * (self.width - (0 if value else self.x))
        elif letter == "J":
            if not value:
                self.rows[self.y][self.x :] = [" "] * (self.width - self.x)
            for row in range(0 if value else self.y + 1, self.height):
                self.rows[row] = [" "] * self.width
        else:
            assert letter == "m", f"unknown sequence {values} {letter}"
