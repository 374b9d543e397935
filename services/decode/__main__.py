from services.decode.app import main

raise SystemExit(main({}))
