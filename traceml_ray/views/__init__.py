"""What every view of a session shows: where it is asked, and the newest answers, renewed once a tick."""
