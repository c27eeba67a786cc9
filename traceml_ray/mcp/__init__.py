"""
A server of the Model Context Protocol: a coding agent asks about sessions, `traceml-ray mcp`.

The answers are those of `traceml_ray.open`, made small enough for a model. Nothing is computed here.
"""
