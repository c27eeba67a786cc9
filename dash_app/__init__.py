"""The package of the web app."""
