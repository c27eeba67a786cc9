"""Data that every view of a session shows: where the session is asked, and its newest answers."""
