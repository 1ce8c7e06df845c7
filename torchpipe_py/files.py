"""Files that are written whole."""

from __future__ import annotations

import os
import uuid


def replace_file(path: str | os.PathLike[str], content: bytes | memoryview, mode: int = 0o666) -> None:
    """Make ``path`` a file with ``content``, of ``mode`` less the umask; whoever reads it sees all of it or what was.

    It is written under a name that nobody can know beforehand and renamed: a link at ``path`` is replaced, never
    followed. Raises ``OSError``, and leaves nothing then.
    """
    folder, name = os.path.split(path)
    unfinished = os.path.join(folder, f".{name}.{uuid.uuid4().hex}.tmp")
    try:
        # "x" is O_EXCL: a name that is there, were it a link, is an error.
        with open(unfinished, "xb", opener=lambda file, flags: os.open(file, flags, mode)) as file:
            file.write(content)
        os.replace(unfinished, path)
    except BaseException:
        if os.path.exists(unfinished):
            os.unlink(unfinished)
        raise
