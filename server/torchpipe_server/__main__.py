"""``python -m torchpipe_server``."""

from torchpipe_server.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
