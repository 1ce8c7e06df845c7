"""Send every image of a folder to the service once and compare its label with the file's. Also an example of a client.

``python scripts/accuracy.py --img_dir configs/demo/images --port 8888``; a file is ``LABEL/name`` or ``LABEL_name``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from torchpipe_client import Client, ClientError, InferenceError

from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.backends.image.files import find_images, label_of


def main(argv: Sequence[str] | None = None) -> int:
    """0 where enough labels are right, 1 where not, 2 where the service does not answer."""
    parser = ArgumentParser(description="Accuracy of a service on labelled images.")
    parser.add_argument("--img_dir", type=Path, required=True, help="with LABEL/name.jpg or LABEL_name.jpg")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8888)
    parser.add_argument("--at_least", type=float, default=0.0, help="accuracy below which the exit status is 1")
    args = parser.parse_args(argv)
    try:
        paths = find_images(args.img_dir)
    except OSError as error:
        parser.error(f"--img_dir {error}")
    try:
        with Client(f"{args.host}:{args.port}", timeout=10) as client:
            right = sum(_is_right(client, path, label_of(path, args.img_dir)) for path in paths)
    except ClientError as error:
        print(f"accuracy: no answer from {args.host}:{args.port}: {error}", file=sys.stderr)
        return 2
    print(f"accuracy {right / len(paths):.3f}: {right} of {len(paths)} right")
    return 0 if right >= args.at_least * len(paths) else 1


def _is_right(client: Client, path: Path, expected: str) -> bool:
    try:
        result = client.infer_batch(path.read_bytes(), uuid=path.name)
    except InferenceError as error:
        print(f"  {path.name}: {error.code}: {error}")
        return False
    if result.label != expected:
        print(f"  {path.name}: predicted {result.label}, is {expected} (score {result.score:.3f})")
    return bool(result.label == expected)


if __name__ == "__main__":
    sys.exit(main())
