"""A session as files for other programs."""
