"""How many tokens the routers of a mixture of experts give to each expert."""
