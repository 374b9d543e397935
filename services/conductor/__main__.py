from services.conductor.app import main

raise SystemExit(main({}))
