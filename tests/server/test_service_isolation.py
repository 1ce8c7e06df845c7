"""Images that crash their decoder, with decoders in processes of their own."""

from __future__ import annotations

import threading
from pathlib import Path

from service import IDL, Client, Process

BACKENDS = '''
import os

import numpy as np

from torchpipe_py import Isolation, ItemBackend, register_backend


@register_backend
class Fragile(ItemBackend):
    """Dies of some images."""

    isolation = Isolation.MOVES

    def forward_item(self, item):
        if item["data"] == b"crash":
            os.abort()
        item["result"] = np.frombuffer(item["data"], np.uint8).reshape(1, -1, 1)


@register_backend
class Label(ItemBackend):
    """The bytes are the label."""

    def forward_item(self, item):
        item["result"] = (item["data"].tobytes().decode(), 1.0)
'''
CONFIG = """
[decode]
backend = "Fragile"
decode_isolation = "none"
instance_num = 2
next = "label"

[label]
backend = "Label"
"""


def test_images_that_crash_their_decoder_cost_themselves(tmp_path: Path) -> None:
    """The flag comes before the configuration."""
    (tmp_path / "fragile.py").write_text(BACKENDS, encoding="utf-8")
    (tmp_path / "fragile.toml").write_text(CONFIG, encoding="utf-8")
    flags = ("--import", str(tmp_path / "fragile.py"), "--decode-isolation", "process")
    with Process(*flags, config=str(tmp_path / "fragile.toml")) as process:
        port = process.wait_started().port
        workers = process.workers
        answers, is_over = [], threading.Event()

        def call_on() -> None:
            with Client(port) as neighbour:
                while not is_over.is_set():
                    answers.append(neighbour.infer_batch(b"fine"))

        thread = threading.Thread(target=call_on)
        thread.start()
        try:
            with Client(port) as client:
                for _ in range(10):
                    error = client.error_of("infer_batch", params=IDL.InferenceParams(uuid="u", data=b"crash"))
                    assert error.code == "worker_died"
                    assert "killed by signal 6" in error.message
        finally:
            is_over.set()
            thread.join()
        assert set(answers) == {("fine", 1.0)}
        assert process.workers == workers
