"""``python -m torchpipe_server``."""

from torchpipe_server.cli import main

raise SystemExit(main())
