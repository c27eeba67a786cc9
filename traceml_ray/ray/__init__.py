"""Everything that uses Ray: the actors, and how they are created, found and called."""
