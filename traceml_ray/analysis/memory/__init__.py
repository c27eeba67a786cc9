"""Memory across ranks: who grew first, what the allocator does not see, and what is left. Pure functions."""
