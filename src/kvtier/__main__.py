"""Run the `kvtier` command with `python -m kvtier`."""

from kvtier.cli import main

raise SystemExit(main())
