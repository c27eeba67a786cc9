"""Traces of torch's profiler: files in; tables, differences and one merged trace out."""
