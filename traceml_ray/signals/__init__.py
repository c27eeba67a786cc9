"""Everything that is known about a run besides its steps. Each signal is a folder."""
