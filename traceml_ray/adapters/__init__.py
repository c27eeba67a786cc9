"""Callbacks for training frameworks: not needed to be watched, but they know more. See README."""
