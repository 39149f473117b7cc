"""`python -m tengserve_adapter` is `tengserve`."""

from tengserve_adapter.cli import main

raise SystemExit(main())
