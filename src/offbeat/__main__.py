"""`python -m offbeat`: the same as the `offbeat` command."""

from offbeat.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
