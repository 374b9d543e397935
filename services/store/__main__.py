from services.store.app import main

raise SystemExit(main({}))
