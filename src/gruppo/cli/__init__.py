"""The command line: `main.py` finds the verb; the other modules hold the verbs, which call the library."""
