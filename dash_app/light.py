"""
Contents of a page as plain data, which assets/app.js turns into elements.

A component costs a browser about a millisecond in Dash, each time that its part of the page changes; an
element of its own making next to nothing. So Dash makes the skeleton and the figures, and this the rest.
"""

from __future__ import annotations

from typing import Any

from dash.development.base_component import Component

_NAMES = {"className": "class", "dateTime": "datetime", "tabIndex": "tabindex"}


def light(content: Any) -> Any:
    """Return components as `{"t": tag, "a": attributes, "c": content}`, and text and lists as they are."""
    if isinstance(content, (list, tuple)):
        return [light(one) for one in content if one is not None]
    if not isinstance(content, Component):
        return content if content is None else str(content)
    component: Any = content
    props = component.to_plotly_json()["props"]
    made: dict[str, Any] = {"t": "a" if content._type == "Link" else content._type.lower()}
    inside = light(props.pop("children", None))
    given = {_NAMES.get(name, name): _attribute(value) for name, value in props.items() if value is not None}
    return made | ({"a": given} if given else {}) | ({"c": inside} if inside not in (None, [], "") else {})


def _attribute(value: Any) -> str:
    if isinstance(value, dict):
        return ";".join(f"{name}:{one}" for name, one in value.items())
    return "" if value is True else str(value)
