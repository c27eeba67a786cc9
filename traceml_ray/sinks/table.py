"""The kinds of sinks, and which of them the settings of a session ask for. One more sink is one more line."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from traceml_ray.settings import Settings

if TYPE_CHECKING:
    from traceml_ray.views.session_poll import SessionPoll

    from .sink import Sink


@dataclass(frozen=True)
class Kind:
    """A kind of sink."""

    name: str
    wanted: Callable[[Settings], bool]
    """Whether the settings ask for it."""
    module: str
    """Module of this package whose `opened(session, settings)` returns the sink. It is imported on use."""
    extra: str
    """Extra of traceml-ray with the packages that it needs; "": none."""

    def open(self, session: SessionPoll, settings: Settings) -> Sink:
        """Open the sink; in place of one that cannot be used, return why. Never raises."""
        from traceml_ray.errors import error_text

        from .sink import Unusable

        try:
            module = importlib.import_module(f"{__package__}.{self.module}")
            sink: Sink = module.opened(session, settings)
        except ModuleNotFoundError as error:
            return Unusable(self.name, f"it needs {error.name}: pip install 'traceml-ray[{self.extra}]'")
        except Exception as error:
            return Unusable(self.name, error_text(error))
        return sink


KINDS = (Kind("prometheus", lambda settings: settings.metrics_port is not None, "scraped", "metrics"),)


def wanted(settings: Settings) -> list[Kind]:
    """Return the kinds of sinks that the settings ask for."""
    return [kind for kind in KINDS if kind.wanted(settings)]
