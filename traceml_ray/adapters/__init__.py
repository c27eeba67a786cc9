"""Callbacks for training frameworks: optional, but they know more. See docs/read/python.md."""
