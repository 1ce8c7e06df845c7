"""``PipeMapper`` in Ray Data's actors, on a cluster of this machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import encode, picture
from kit.waits import eventually

from torchpipe_py.ray import PipeMapper

pytest.importorskip("ray.data")  # not "ray", which might be the folder of these tests

import ray
from ray.data import ActorPoolStrategy

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

STORE_BYTES = 100 << 20
BACKENDS = """
from pathlib import Path

from torchpipe_py import ItemBackend, register_backend


@register_backend
class TellsItsEnd(ItemBackend):
    def forward_item(self, item):
        item["result"] = item["data"]

    def close(self):
        Path({path!r}).touch()
"""


@pytest.fixture
def cluster() -> Iterator[None]:
    """Two CPUs; results come in order."""
    ray.init("local", num_cpus=2, object_store_memory=STORE_BYTES, include_dashboard=False, log_to_driver=False)
    context = ray.data.DataContext.get_current()
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    yield
    ray.shutdown()


def test_a_dataset_of_files(cluster: None, tmp_path: Path) -> None:
    images, ended, code = tmp_path / "images", tmp_path / "ended", tmp_path / "tells_its_end.py"
    images.mkdir()
    for number in range(40):
        content = encode(picture(30 + number % 5, 40, seed=number))
        (images / f"{number:02d}.jpg").write_bytes(b"no image" if number % 10 == 5 else content)
    code.write_text(BACKENDS.format(path=str(ended)), encoding="utf-8")
    config: dict[str, Any] = {"backend": "S[DecodeMat,ResizeMat,Mat2Tensor,TellsItsEnd]", "device": "cpu"}
    config |= {"resize_h": 8, "resize_w": 9, "instance_num": 2}
    read = ray.data.read_binary_files(str(images), include_paths=True, override_num_blocks=4)
    made = read.map_batches(
        PipeMapper,
        fn_constructor_args=(config,),
        fn_constructor_kwargs={"imports": [str(code)]},
        compute=ActorPoolStrategy(size=1),
        batch_size=8,
    )
    rows = made.take_all()
    assert [Path(row["path"]).name for row in rows] == [f"{number:02d}.jpg" for number in range(40)]
    assert [number for number, row in enumerate(rows) if row["error"]] == [5, 15, 25, 35]
    mapper = PipeMapper({**config, "backend": "S[DecodeMat,ResizeMat,Mat2Tensor]"})
    paths = sorted(images.iterdir())
    column = np.array([path.read_bytes() for path in paths], object)
    expected = mapper({"bytes": column})
    mapper.close()
    assert np.array_equal(np.stack([row["result"] for row in rows]), expected["result"])
    assert [row["error"] for row in rows] == expected["error"].tolist()
    eventually(ended.exists)  # the actor let go of its pipe, which closed its backends
