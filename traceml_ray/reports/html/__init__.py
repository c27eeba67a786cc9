"""`report.html`: one file that needs nothing else, no script, no network, no style of anybody else's."""
