"""Where a session is reported besides its own faces: each place is a sink, all in a process of their own."""
