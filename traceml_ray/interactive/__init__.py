"""Sessions in Python, live or stored: questions, tables, figures and HTML."""
