"""
Long lists. Their search text, sort order and page number are in the URL.

dash-ag-grid is not used: it costs 360 kB more (gzip) at the first visit of any page, and 250 kB more at the
first visit of a list. Instead the server selects and sorts the rows, and sends one page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dash import html
from dash.development.base_component import Component

from traceml_ray import text
from traceml_ray.document.model import Column
from traceml_ray.text import natural
from traceml_ray.views.values import whole_number

from .elements import aria, link
from .route import Route

PER_PAGE = 100
Keys = Mapping[str, Callable[[Any], Any]]
"""Sort keys of a list, by column header. A key of None (not known) is sorted last in both directions."""


class ChosenRows(NamedTuple):
    """One page of a list."""

    items: Sequence[Any]
    n_matching: int
    """Number of items that match the search, on all pages."""
    n_all: int
    """Number of items without the search."""
    page: int
    """Number of this page, from 1."""
    pages: int


def choose(items: Sequence[Any], route: Route, words_of: Callable[[Any], str], keys: Keys) -> ChosenRows:
    """
    Return the items that the URL asks for: those that match its search (`q`, among `words_of(item)`), in its
    order (`sort`, one of `keys`), limited to its `page`.
    """
    words = (route.get("q") or "").casefold().split()
    matching = [item for item in items if _has(words_of(item).casefold(), words)] if words else [*items]
    name = route.get("sort") or ""
    if key := keys.get(name.removeprefix("-")):
        with_key = [item for item in matching if key(item) is not None]
        unknown = [item for item in matching if key(item) is None]
        matching = (
            sorted(with_key, key=lambda item: _comparable(key(item)), reverse=name[:1] == "-") + unknown
        )
    pages = max(1, -(-len(matching) // PER_PAGE))
    page = min(whole_number(route.get("page")) or 1, pages)
    return ChosenRows(matching[(page - 1) * PER_PAGE :][:PER_PAGE], len(matching), len(items), page, pages)


def _has(among: str, words: Iterable[str]) -> bool:
    """Return whether all `words` occur in a text. A number must occur as a whole word."""
    return all(word in (among.split() if word.isdecimal() else among) for word in words)


def _comparable(value: Any) -> Any:
    return natural(value) if isinstance(value, str) else value


class SearchField(Component):
    """
    The search field of a page. Its text is `q` in the URL, see assets/app.js: the browser alone reads and
    writes it, so that no answer, however late, takes away what a person types. `dcc.Input` has its text from
    the server.
    """

    _namespace, _type = "traceml_ray", "SearchField"
    _prop_names = ["id", "placeholder"]
    _children_props: list[str] = []
    _valid_wildcard_attributes: list[str] = []

    def __init__(self, id: str, placeholder: str) -> None:
        self.id, self.placeholder = id, placeholder


def field(what: str) -> html.Div:
    """Return the search field of a page. `what` names the items searched."""
    label = html.Label(f"Search {what}", htmlFor="find", className="unseen")
    return html.Div([label, SearchField("find", f"Search {what} …")], role="search")


def heads(columns: Iterable[Column], keys: Keys, route: Route) -> dict[str, Any]:
    """
    Return the heads of columns that have a sort key, as links: a click sorts by the column, another one in
    the other direction.
    """
    chosen, shown = route.get("sort") or "", {}
    for column in columns:
        name = column.name
        if name in keys:
            first = f"-{name}" if column.number else name  # numbers: the largest first
            other = name if first != name else f"-{name}"
            sign = {name: " ↑", f"-{name}": " ↓"}.get(chosen, "")
            following = other if chosen == first else None if chosen == other else first
            shown[name] = link(
                column.head() + sign,
                route.here(sort=following, page=None),
                "head",
                on=bool(sign),
                title=f"In order of {name}",
            )
    return shown


def pages(chosen: ChosenRows, route: Route, noun: str) -> html.Div:
    """Return how many items (`noun`) there are, and links to the pages of the list around this one."""
    page, last = chosen.page, chosen.pages
    size = text.count(chosen.n_all, noun)
    size = size if chosen.n_matching == chosen.n_all else f"{chosen.n_matching:,} of {size}"
    shown: list[Any] = [html.Span(size)]
    if last > 1:
        first = (page - 1) * PER_PAGE + 1
        shown = [html.Span(f"{first:,}–{first + len(chosen.items) - 1:,} of {size}")]
        near = sorted({1, page - 1, page, page + 1, last} & {*range(1, last + 1)})
        shown += [link(f"{n:,}", route.here(page=n if n > 1 else None), "chip", on=n == page) for n in near]
    return html.Div(shown, className="pages", **aria(label="Pages"))


def states(route: Route, counts: Mapping[str, int]) -> html.Nav:
    """Return links that filter a list by state, with the number of items in each."""
    values = {f"all {sum(counts.values()):,}": None} | {f"{name} {n:,}": name for name, n in counts.items()}
    return chips(route, "state", values, "State")


def chips(route: Route, name: str, values: Mapping[str, Any], label: str) -> html.Nav:
    """
    Return links that set the query name `name` of the URL to one of `values` (label → value). None removes
    it.
    """
    chosen = route.get(name)
    links = [
        link(shown, route.here(**{name: value, "page": None}), "chip", on=chosen == value)
        for shown, value in values.items()
    ]
    return html.Nav(links, className="chips", **aria(label=label))
