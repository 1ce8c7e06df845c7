"""The options of ``torchpipe encrypt``."""

from __future__ import annotations

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare every option."""
    option = parser.add_argument
    option("model", nargs="?", metavar="MODEL", help="an ONNX file, TorchScript, a .pt2 or a TensorRT engine")
    keys = parser.add_mutually_exclusive_group(required=True)
    keys.add_argument("--key_file", default="", metavar="FILE", help="with the key: 32 bytes, raw, in hex or in base64")
    keys.add_argument("--key_env", default="", metavar="NAME", help="an environment variable with the key")
    keys.add_argument(
        "--new_key", default="", metavar="FILE", help="make a key, and write it to FILE, which must not exist"
    )
    option("--out", metavar="FILE", help="the encrypted model (default: MODEL.enc)")
    option("--force", action="store_true", help="replace it if it is there")
