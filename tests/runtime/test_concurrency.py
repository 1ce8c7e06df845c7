"""Many threads, good and bad images, answers known beforehand."""

from __future__ import annotations

import random
from typing import Any

from conftest import encode, picture
from kit.waits import in_threads

from torchpipe_py import DecodeError, pipe

THREADS, CALLS = 32, 60


def test_no_answer_is_ever_lost_or_mistaken(classifier: str) -> None:
    config: dict[str, Any] = {
        "decode": {"backend": "DecodeMat", "instance_num": 2, "next": "prepare"},
        "prepare": {"backend": "S[ResizeMat,cvtColorMat,Mat2Tensor]", "resize_h": 8, "resize_w": 8, "color": "rgb"},
        "model": {"backend": "OnnxTensor", "model": classifier, "max": 8, "postprocessor": "SoftmaxMax"},
    }
    config["prepare"]["next"] = "model"
    config["model"] |= {"mean": 127, "std": 64, "instance_num": 2, "batching_timeout": 50}
    good = [encode(picture(20, 16 + seed, seed)) for seed in range(24)]
    bad = [b"", b"no image", b"\xff\xd8\xff\xe0 no jpeg", good[0][:40]]
    answers: dict[bytes, Any] = {}

    def work(index: int) -> None:
        random_ = random.Random(index)
        for _ in range(CALLS):
            image = random_.choice(bad if random_.random() < 0.1 else good)
            data: dict[str, Any] = {"data": image}
            p(data)
            if image in bad:
                assert "result" not in data
                assert type(data["error"]) is answers[image]
            else:
                label, score = data["result"]
                assert label == answers[image][0]
                assert abs(score - answers[image][1]) < 1e-5

    with pipe(config) as p:
        for image in good + bad:
            data: dict[str, Any] = {"data": image}
            p(data)
            answers[image] = data["result"] if "result" in data else type(data["error"])
        in_threads(THREADS, work)
        stats = p.stats()
    assert {answers[image] for image in bad} == {DecodeError}
    assert len({answers[image] for image in good}) == len(good)
    assert (stats["inflight"], stats["admitted"]) == (0, THREADS * CALLS + len(good) + len(bad))
    assert max(stats["nodes"]["model"]["batch_sizes"]) == 8
