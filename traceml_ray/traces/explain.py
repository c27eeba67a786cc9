"""
Explains by operation why a rank is late, for a profile that was made for this purpose.

`python -m traceml_ray.traces.explain FOLDER` runs in a separate process, because reading traces takes seconds
of a CPU core.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from traceml_ray.store.profiles import StoredProfile, change, read_profile
from traceml_ray.traces.chrome import TraceError
from traceml_ray.traces.difference import Difference, RecordingError, difference
from traceml_ray.traces.sources import sources_of_profile


def explain(stored: StoredProfile) -> list[str]:
    """
    Return what the suspect of a profile does more of than the median rank.

    The comparison is inside the late stage if that shows a difference, otherwise over the whole step. Empty
    if that was not recorded.
    """
    profile, compared = stored.profile, None
    if profile.suspect is None or profile.median is None:
        return []
    sources = sources_of_profile(stored)
    for stage in dict.fromkeys((profile.stage, None)):
        try:
            compared = difference(sources, profile.suspect, profile.median, stage)
        except (RecordingError, TraceError):
            continue
        if _names_an_operation(compared):
            break
    return [] if compared is None else compared.sentences


def _names_an_operation(difference: Difference) -> bool:
    return any(f"`{row.name}`" in difference.sentences[0] for row in difference.operations)


def main() -> int:
    """Explain the profile in the given folder, and write the explanation to its manifest."""
    path = Path(sys.argv[1])
    os.nice(10)
    stored = StoredProfile(path, read_profile(path))
    change(path, msgspec.structs.replace(stored.profile, found=explain(stored)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
