"""In the place of Ray where it is not installed."""

raise ImportError("Ray is not installed")
