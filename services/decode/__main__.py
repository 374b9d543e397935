from services.worker.app import main

raise SystemExit(main("decode", {}))
