"""``python -m services.gateway``."""

from services.gateway.app import main

raise SystemExit(main({}))
