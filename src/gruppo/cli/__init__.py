"""The command line: `main.py` finds the verb, one module per verb builds a config and calls the library."""
