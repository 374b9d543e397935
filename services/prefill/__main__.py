from services.prefill.app import main

raise SystemExit(main({}))
