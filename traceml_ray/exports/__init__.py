"""Exports of a session as files for other programs."""
