"""The processes that we start: tied to us, read line by line, started again, always ended."""
