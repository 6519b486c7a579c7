"""``python -m routing_lab`` is ``routing-lab``."""

from routing_lab.cli import main

raise SystemExit(main())
