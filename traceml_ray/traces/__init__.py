"""Traces of torch's profiler. Reads files; makes tables, differences and one merged trace."""
