from services.store_manager.app import main

raise SystemExit(main({}))
