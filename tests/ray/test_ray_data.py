"""``PipeMapper`` without Ray: columns, policies, types, and that a dataset is what the training's loader gives."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Register, encode, picture
from kit.training_data import write_images
from kit.waits import in_threads
from torch.utils.data import DataLoader

from torchpipe_py import Detections, InvalidRequest, ItemBackend, UnknownNode, parse_toml, pipe
from torchpipe_py.ray import PipeMapper
from torchpipe_py.ray.columns import columns_of
from torchpipe_py.training import BadSample, TrainingError, wrap_dataloader_torchpipe

ROOT = Path(__file__).resolve().parents[2]
BAD = (b"no image", b"", None, encode(picture(40, 40))[:200])
REASONS = [
    "corrupt: 8 bytes: not a JPEG, PNG, WebP or BMP image",
    "empty: the dataset gave no bytes",
    "empty: the dataset gave no bytes",
    "corrupt: 200 bytes: JPEG: cut off in its header, after 200 bytes",
]

FOUND = Detections([[1, 2, 3, 4]], [0.1], [0], ("cat",))

Make = Callable[..., PipeMapper]


@pytest.fixture
def mapper() -> Iterator[Make]:
    """Makes mappers, which are closed afterwards."""
    made: list[PipeMapper] = []

    def make(*args: Any, **options: Any) -> PipeMapper:
        made.append(PipeMapper(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def objects(values: Sequence[Any]) -> np.ndarray:
    """An object array of bytes, as in Ray Data."""
    column = np.empty(len(values), object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def rows(values: Sequence[Any]) -> dict[str, np.ndarray]:
    """Rows as of ``read_binary_files``, and a number."""
    paths = np.array([f"{row}.jpg" for row in range(len(values))], np.str_)
    return {"bytes": objects(values), "path": paths, "number": np.arange(len(values))}


def types(batch: dict[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Types of the columns, without lengths of texts and columns. Without rows, bytes have a type of NumPy."""
    kinds = {np.bytes_: "bytes", np.str_: "texts"}
    return {
        name: (
            "bytes" if name == "raw" else kinds.get(column.dtype.type, column.dtype.name),
            column.shape[1:],
        )
        for name, column in batch.items()
    }


def jpegs(count: int) -> list[bytes]:
    return [encode(picture(30 + number, 40, seed=number)) for number in range(count)]


def test_labels_equal_the_pipes_and_other_columns_stay(mapper: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    images = [path.read_bytes() for path in sorted(Path("configs/demo/images").glob("*.jpg"))[::8]]
    given = rows(images)
    got = mapper("configs/demo.toml")(given)
    with pipe("configs/demo.toml") as run:
        results = [request["result"] for request in run([{"data": image} for image in images])]
    assert list(got) == ["path", "number", "label", "score", "error"]
    assert got["label"].tolist() == [label for label, _ in results]
    assert got["score"].dtype == np.float32
    assert got["score"] == pytest.approx([score for _, score in results], abs=1e-5)
    assert got["error"].tolist() == [""] * len(images)
    assert got["path"] is given["path"]
    assert got["number"] is given["number"]


@pytest.mark.parametrize("name", ["preprocess_cpu.toml", "preprocess_pillow.toml"])
def test_dataset_equals_loader_of_same_toml(mapper: Make, tmp_path: Path, name: str) -> None:
    dataset, toml = write_images(tmp_path / "images", 7, corrupt=(2,)), ROOT / "configs" / name
    plain = DataLoader(dataset, batch_size=7)
    with wrap_dataloader_torchpipe("single", plain, toml, bad_samples="mask") as loader:
        (batch,) = loader
    got = mapper(toml)(rows([Path(path).read_bytes() for path, _ in dataset.samples]))
    assert torch.equal(torch.from_numpy(got["result"]), batch.images)
    assert (got["error"] == "").tolist() == batch.mask.tolist()


def test_bad_rows_follow_their_policy(mapper: Make, toml: str) -> None:
    images = jpegs(2)
    given = rows([images[0], *BAD, images[1]])
    masked = mapper(toml, bad_samples="mask")(given)
    assert masked["error"].tolist() == ["", *REASONS, ""]
    assert masked["result"].shape == (6, 3, 24, 20)
    assert [bool(image.any()) for image in masked["result"]] == [True, False, False, False, False, True]
    skipped = mapper(toml, bad_samples="skip")(given)
    assert list(skipped) == ["path", "number", "result"]
    assert skipped["number"].tolist() == [0, 5]
    assert skipped["path"].tolist() == ["0.jpg", "5.jpg"]
    assert np.array_equal(skipped["result"], masked["result"][[0, 5]])
    message = r'row 1 of a batch \(1\.jpg\): corrupt: 8 bytes: .* \(bad_samples="skip" or "mask" goes on without it\)'
    with pytest.raises(BadSample, match=message):
        mapper(toml, bad_samples="raise")(given)


class Describe(ItemBackend):
    """Something of each type."""

    def forward_item(self, item: dict[str, Any]) -> None:
        height = item["data"].shape[0]
        item["result"] = ("tall" if height > 35 else "wide", height)
        item.update(size=height, ratio=0.5, note="x", raw=b"\0", boxes=[[1, 2.5]], tall=height > 35)


@pytest.mark.parametrize("policy", ["mask", "skip"])
@pytest.mark.parametrize("kind", ["fixed", "ragged", "described"])
def test_every_batch_has_the_same_types(mapper: Make, register: Register, toml: str, policy: str, kind: str) -> None:
    described = {"backend": f"S[DecodeMat,{register(Describe)}]"}
    config: Any = {"fixed": toml, "ragged": {"backend": "DecodeMat"}, "described": described}[kind]
    outputs = ["result", "size", "ratio", "note", "raw", "boxes", "tall"] if kind == "described" else ["result"]
    run = mapper(config, outputs=outputs, bad_samples=policy)
    whole = types(run(rows([*jpegs(3), b"bad"])))
    assert types(run(rows(jpegs(1)))) == types(run(rows([b"bad", b"worse"]))) == types(run(rows([]))) == whole
    image = ("uint8", (3, 24, 20)) if kind == "fixed" else ("object", ())
    assert whole["label" if kind == "described" else "result"] == (("texts", ()) if kind == "described" else image)


@pytest.mark.parametrize(
    ("written", "columns"),
    [
        ([("ring", 0.75), (7, 1)], {"label": ["ring", "7", ""], "score": [0.75, 1.0, 0.0]}),
        (["ü\ud800", "b"], {"result": ["ü?", "b", ""]}),
        ([torch.ones(1, 2), torch.zeros(1, 2)], {"result": [[1, 1], [0, 0], [0, 0]]}),
        ([torch.ones(1, 2, dtype=torch.bfloat16)], {"result": [[1, 1], [0, 0]]}),
        ([[torch.ones(1, 2), torch.ones(1, 3)]], {"result_0": [[1] * 2, [0] * 2], "result_1": [[1] * 3, [0] * 3]}),
        ([[("ring", 0.5)], []], {"result": ['[["ring", 0.5]]', "[]", ""]}),
        ([{"box": np.arange(2)}], {"result": ['{"box": [0, 1]}', ""]}),
        ([np.float32(0.5)], {"result": [0.5, 0.0]}),
        ([3], {"result": [3, 0]}),
        ([True], {"result": [True, False]}),
        (["a", "bc"], {"result": ["a", "bc", ""]}),
        ([b"a\0"], {"result": [b"a\0", b""]}),
        ([[FOUND]], {"result": ['[[{"box": [1.0, 2.0, 3.0, 4.0], "score": 0.1, "class": 0, "label": "cat"}]]', ""]}),
    ],
)
def test_columns_of_each_output_type(written: list[Any], columns: dict[str, list[Any]]) -> None:
    made = {each.name: each.array([*map(each.value, written), None]) for each in columns_of("result", written)}
    assert {name: array.tolist() for name, array in made.items()} == columns
    ragged = columns_of("result", given := [np.ones((2, 1)), np.ones((1, 1))])[0]
    assert [array.shape for array in ragged.array([*map(ragged.value, given), None])] == [(2, 1), (1, 1), (0, 0)]


def test_detections_have_a_column_for_each_of_their_arrays() -> None:
    given = [FOUND, FOUND[:0]]
    made = {each.name: each.array([*map(each.value, given), None]) for each in columns_of("result", given, "my_")}
    assert list(made) == ["my_boxes", "my_scores", "my_classes", "my_labels"]
    assert [array.shape for array in made["my_boxes"]] == [(1, 4), (0, 4), (0, 4)]
    assert [array.dtype.name for array in made["my_scores"]] == ["float32"] * 3
    assert made["my_labels"].tolist() == [["cat"], [], []]
    column = columns_of("result", [Detections(np.ones((1, 4)), [1], [0], (), np.ones((1, 5, 3)), (b"png",))])[-1]
    assert (column.name, column.blank) == ("masks", [])
    for wrong, said in ((FOUND, "expected detections with masks"), ([], "expected Detections, got a list of 0")):
        with pytest.raises(ValueError, match=said):
            column.value(wrong)
    assert column.value(FOUND[:0]) == []


def test_a_result_of_another_type_names_the_row(mapper: Make) -> None:
    run = mapper({"backend": "S[DecodeMat,Mat2Tensor]", "device": "cpu"}, examples=jpegs(1))
    assert run(rows(jpegs(1)))["result"].shape == (1, 3, 30, 40)
    message = r"row 1 of a batch \(1\.jpg\): 'result': expected uint8 3x30x40, got uint8 3x31x40; examples="
    with pytest.raises(TrainingError, match=message):
        run(rows(jpegs(2)))


def test_more_rows_than_the_pipe_accepts_from_two_threads(mapper: Make, toml: str) -> None:
    config = parse_toml(toml)
    config["global"]["max_inflight"] = 3
    run, given = mapper(config), rows(jpegs(8))
    expected = run(given)["result"]

    def again(index: int) -> None:
        assert np.array_equal(run(given)["result"], expected)

    in_threads(2, again)


def test_accepts_decoded_images_with_color(mapper: Make) -> None:
    config = {"backend": "S[ResizeMat,cvtColorMat]", "resize_h": 8, "resize_w": 9, "color": "bgr"}
    images = np.stack([picture(20, 30, seed) for seed in range(3)])
    images.flags.writeable = False
    rgb = mapper(config, column="image", color="rgb")({"image": images})["result"]
    bgr = mapper(config, column="image", color="bgr")({"image": objects(list(images))})["result"]
    assert rgb.shape == (3, 8, 9, 3)
    assert np.array_equal(rgb[..., ::-1], bgr)
    with pytest.raises(TrainingError, match=r'expected a Mat .*, got bytes; color="rgb" is for decoded images'):
        mapper(config, column="image")


def test_refuses_invalid_batches(mapper: Make, toml: str) -> None:
    run, given = mapper(toml), rows(jpegs(1))
    with pytest.raises(InvalidRequest, match=r"the dataset has no column 'bytes'; did you mean 'byte'\?"):
        run({"byte": given["bytes"]})
    with pytest.raises(InvalidRequest, match=r'expected a dict of arrays, got list: use batch_format="numpy"'):
        run([given])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"has a column 'result', 'error' already; prefix="):
        run({**given, "result": given["number"], "error": given["number"]})
    assert list(mapper(toml, prefix="pipe_")({**given, "result": given["number"]}))[-2:] == [
        "pipe_result",
        "pipe_error",
    ]


def test_checks_arguments_when_actor_starts(toml: str) -> None:
    for options, message in (
        ({"bad_samples": "drop"}, "bad_samples 'drop' is not known; valid: mask, raise, skip"),
        ({"color": "rbg"}, r"color 'rbg' is not known; did you mean 'rgb'\?"),
        ({"outputs": ["results"]}, r"the pipe wrote no 'results'; did you mean 'result'\?"),
    ):
        with pytest.raises(ValueError, match=message):
            PipeMapper(toml, **options)  # type: ignore[arg-type]
    with pytest.raises(UnknownNode, match="no root 'decoder'; did you mean 'decode'"):
        PipeMapper(toml, node_name="decoder")


def test_defect_raises_under_every_policy(mapper: Make, register: Register) -> None:
    class Fails(ItemBackend):
        def forward_item(self, item: dict[str, Any]) -> None:
            if item["data"] == b"poison":
                raise RuntimeError("broken")
            item["result"] = 1

    run = mapper({"backend": register(Fails)}, bad_samples="skip", examples=[b"fine"])
    with pytest.raises(TrainingError, match=r"row 1 of a batch \(1\.jpg\): the pipe raised \(backend_error\) .*broken"):
        run(rows([b"fine", b"poison"]))
    assert run(rows([b"fine"]))["result"].tolist() == [1]


def test_options_come_from_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert PipeMapper.options("configs/demo_nodes.toml") == {"num_cpus": 2.0, "batch_size": 160}
    assert PipeMapper.options("configs/preprocess_cpu.toml") == {"num_cpus": 2.0, "batch_size": 64}
    config = {"backend": "S[DecodeTensor,ResizeTensor]", "resize_h": 8, "resize_w": 8, "device_id": 1}
    assert PipeMapper.options(config) == {"num_gpus": 2.0, "batch_size": 64}


def test_class_can_be_pickled_but_not_an_instance(mapper: Make, toml: str) -> None:
    config = parse_toml(toml)
    cls, (again,) = pickle.loads(pickle.dumps((PipeMapper, (config,))))
    assert (cls, again, again.source) == (PipeMapper, config, toml)
    with pytest.raises(TypeError, match=r"give map_batches the class, and fn_constructor_args=\(config,\)"):
        pickle.dumps(mapper(toml))
