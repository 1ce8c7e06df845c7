"""``python -m torchpipe_server``."""

import os
import sys

if sys.path[:1] == [os.getcwd()] and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # `-m` adds it, and a file in it could hide a library of the same name

from torchpipe_server.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
