"""`python -m kvtier` is the `kvtier` command."""

from kvtier.cli import main

raise SystemExit(main())
