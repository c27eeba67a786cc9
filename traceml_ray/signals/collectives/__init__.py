"""Collectives: which rank did not join, from the calls that each rank has made."""
