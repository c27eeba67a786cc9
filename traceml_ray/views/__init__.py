"""The data that every view of a session shows: how the session is queried, and its newest answers."""
