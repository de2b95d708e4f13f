"""`python -m gruppo` is the `gruppo` command."""

from gruppo.cli.main import main

if __name__ == "__main__":
    main()
