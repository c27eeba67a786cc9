"""The terminal's view of a session: `traceml-ray top`."""
