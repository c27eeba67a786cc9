"""The last lines that ranks print."""
