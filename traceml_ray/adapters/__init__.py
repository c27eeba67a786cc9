"""Optional callbacks for training frameworks, which add what the framework knows. See docs/read/python.md."""
