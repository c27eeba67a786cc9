"""All that uses Ray: the actors, how they are made, found and called."""
