"""What a person has of a session in Python, live or stored: its questions, tables, figures and HTML."""
