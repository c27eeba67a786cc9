"""Recorded memory, whoever recorded it: files are read here and become series for `analysis.memory`."""
