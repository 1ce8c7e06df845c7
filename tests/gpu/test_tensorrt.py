"""TensorrtTensor on a GPU: numbers, batches, instances, and what bad input gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import save_model
from kit.gpu import NORMALISE, backend_of, forward, gpu_bytes, jpeg, needs_tensorrt, normalised, photo, resnet, work_dir
from kit.waits import in_threads
from onnx import TensorProto, helper, save

from torchpipe_py import BackendError, ConfigError, pipe, register_postprocessor, registry
from torchpipe_py.backends.model.postprocess import make_postprocessor

pytestmark = [needs_tensorrt, pytest.mark.timeout(400)]


def resnet_config(arch: str, onnx: str, **more: Any) -> dict[str, Any]:
    return {
        "backend": "SyncTensor[TensorrtTensor]",
        "model": onnx,
        "max": 8,
        "model::cache": str(work_dir() / f"{arch}_8.trt"),
        **NORMALISE,
        **more,
    }


@pytest.fixture(scope="module", params=["resnet18", "resnet50"])
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def resnet18() -> str:
    return resnet("resnet18")[1]


def small_model(
    path: Path, *, channels: int = 4, batch: Any = "n", size: tuple[Any, Any] = (8, 8), seed: int = 0
) -> str:
    """Conv 3×3, ReLU, global mean: N×3×H×W to N×channels."""
    weight = np.random.default_rng(seed).standard_normal((channels, 3, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["input", "weight"], ["mapped"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["mapped"], ["positive"], name="relu"),
        helper.make_node("ReduceMean", ["positive"], ["logits"], name="mean", axes=[2, 3], keepdims=0),
    ]
    return save_model(path, nodes, {"input": [batch, 3, *size]}, {"logits": [batch, channels]}, {"weight": weight})


# -- numbers ------------------------------------------------------------------------------------------------------


def test_fp16_is_pytorchs_fp32_within_a_hundredth_at_every_batch(arch: str) -> None:
    model, onnx = resnet(arch)
    mats = [photo(224, 224, 100 + seed) for seed in range(8)]
    with torch.inference_mode():
        expected = model(torch.cat([torch.from_numpy(normalised(mat)) for mat in mats]))
    worst = 0.0
    with backend_of(resnet_config(arch, onnx)) as backend:
        assert (backend.min(), backend.max()) == (1, 8)
        for count in range(1, 9):
            results = torch.cat([item["result"] for item in forward(backend, mats[:count])]).cpu()
            assert results.shape == (count, 1000)
            errors = (results - expected[:count]).norm(dim=1) / expected[:count].norm(dim=1)
            worst = max(worst, float(errors.max()))
    print(f"{arch}: relative error of fp16 at most {worst:.2e}")
    assert worst < 1e-2


def test_a_result_is_the_same_bits_in_any_batch_at_any_place(arch: str) -> None:
    onnx = resnet(arch)[1]
    mats = [photo(224, 224, 200 + seed) for seed in range(8)]
    with backend_of(resnet_config(arch, onnx)) as backend:
        alone = forward(backend, mats[:1])[0]["result"]
        for count in range(2, 9):
            for place in (0, count // 2, count - 1):
                others = mats[1:count]
                batch = [*others[:place], mats[0], *others[place:]]
                result = forward(backend, batch)[place]["result"]
                assert torch.equal(result, alone), f"batch of {len(batch)}, place {place}"


def test_every_kind_of_input_gives_the_same(resnet18: str) -> None:
    mat = photo(224, 224, 1)
    chw = torch.from_numpy(np.ascontiguousarray(mat.transpose(2, 0, 1)))
    kinds = [mat, chw[None], chw, chw[None].float(), chw[None].cuda(), chw.cuda(), chw[None].float().cuda()]
    kinds += [chw[None].numpy(), chw[None].float().numpy(), np.asfortranarray(mat)]
    with backend_of(resnet_config("resnet18", resnet18)) as backend:
        expected = forward(backend, [mat])[0]["result"]
        kept = expected.clone()
        forward(backend, [photo(224, 224, 2)])
        assert torch.equal(expected, kept), "a result changes when the next batch comes"
        for kind in kinds:
            assert torch.equal(forward(backend, [kind])[0]["result"], expected), type(kind)
            assert torch.equal(forward(backend, [kind, kind, kind])[1]["result"], expected)
        for item in forward(backend, kinds[:8]):  # a batch of all kinds
            assert torch.equal(item["result"], expected)


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.UINT8])
def test_normalises_channels_last_of_any_type_as_onnx_runtime_does(tmp_path: Path, dtype: int) -> None:
    dims = ["n", 8, 6, 3]
    nodes = [
        helper.make_node("Transpose", ["x"], ["planes"], perm=[0, 3, 1, 2]),
        helper.make_node("Cast", ["planes"], ["y"], to=TensorProto.FLOAT),
    ]
    given = helper.make_tensor_value_info("x", dtype, dims)
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3, 8, 6])
    graph = helper.make_graph(nodes, "casts", [given], [made])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    keys = {"model": str(tmp_path / "m.onnx"), "max": 4, "mean": "123.675, 116.28, 103.53", "std": "58, 57, 56"}
    mats = [photo(8, 6, seed) for seed in range(4)]
    with pipe({"backend": "OnnxTensor", "providers": "CPUExecutionProvider", **keys}) as run:
        expected = torch.cat([run({"data": mat})["result"] for mat in mats])
    with backend_of({"backend": "SyncTensor[TensorrtTensor]", "precision": "fp32", **keys}) as backend:
        for values in (mats, [torch.from_numpy(mat)[None].cuda() for mat in mats]):
            results = torch.cat([item["result"] for item in forward(backend, values)]).cpu()
            torch.testing.assert_close(results, expected, atol=2e-3, rtol=2e-3)


def numbers(result: Any) -> list[float]:
    """All of a postprocessor's result, in order."""
    if isinstance(result, torch.Tensor):
        return result.flatten().tolist()
    if isinstance(result, (list, tuple)):
        return [number for part in result for number in numbers(part)]
    return [float(result)]


@pytest.mark.parametrize("name", ["cpu", "SoftmaxCpu", "SoftmaxMax", "ArgMax", "SoftmaxArgMax", "TopK", "Sigmoid"])
def test_postprocessors_on_the_gpu_equal_those_on_the_host(resnet18: str, name: str) -> None:
    mats = [photo(224, 224, seed) for seed in range(5)]
    with backend_of(resnet_config("resnet18", resnet18)) as backend:
        logits = torch.cat([item["result"].cpu() for item in forward(backend, mats)])
    with backend_of(resnet_config("resnet18", resnet18, postprocessor=name)) as backend:
        items = forward(backend, mats)
        forward(backend, mats[::-1])  # overwrites what results must not be views of
    cls: Any = registry.default.find_postprocessor(name)
    for item, wanted in zip(
        items, make_postprocessor(cls, {"k": 5, "threshold": 0.5, "max": 8}).forward([logits]), strict=True
    ):
        expected = wanted if isinstance(wanted, dict) else {"result": wanted}
        for key, value in expected.items():
            assert numbers(item[key]) == pytest.approx(numbers(value), rel=1e-3, abs=1e-6)
            assert not isinstance(item[key], torch.Tensor) or item[key].device.type == "cpu"


@pytest.mark.usefixtures("restored")
def test_a_postprocessor_of_ones_own_gets_tensors_on_the_gpu(resnet18: str) -> None:
    class Largest:
        def forward(self, outputs: list[Any]) -> list[Any]:
            assert outputs[0].is_cuda
            return outputs[0].argmax(1).tolist()

    register_postprocessor(Largest, "Largest")
    mats = [photo(224, 224, seed) for seed in range(3)]
    with backend_of(resnet_config("resnet18", resnet18, postprocessor="Largest")) as backend:
        assert all(isinstance(item["result"], int) for item in forward(backend, mats))


def test_profiles_dynamic_shapes_and_layers_in_fp32(tmp_path: Path) -> None:
    model = small_model(tmp_path / "small.onnx", size=("height", "width"))
    base = {"backend": "TensorrtTensor", "model": model, "precision": "fp32"}
    mats = [photo(16, 16, seed) for seed in range(6)]
    with backend_of({**base, "max": "8x3x16x16", "min": "1x3x16x16"}) as one:
        expected = [item["result"] for item in forward(one, mats)]
    with backend_of({**base, "max": "2x3x32x32;8x3x32x32", "min": "1x3x4x4;3x3x4x4"}) as two:
        assert (two.min(), two.max()) == (1, 8)
        for count in (1, 2, 3, 6):
            for item, want in zip(forward(two, mats[:count]), expected[:count], strict=True):
                torch.testing.assert_close(item["result"], want, rtol=1e-5, atol=1e-5)
        mixed = forward(two, [photo(16, 16, 0), photo(8, 24, 0), photo(16, 16, 1)])
        torch.testing.assert_close(mixed[2]["result"], expected[1], rtol=1e-5, atol=1e-5)
        assert "33" in str(forward(two, [photo(33, 16, 0)])[0]["error"])
        torch.testing.assert_close(forward(two, mats[:1])[0]["result"], expected[0], rtol=1e-5, atol=1e-5)
    square = small_model(tmp_path / "square.onnx", size=("side", "side"))
    with backend_of({**base, "model": square, "max": "2x3x32x32", "min": "1x3x4x4"}) as backend:
        with pytest.raises(ValueError, match="no output for inputs of 1x3x8x24"):
            forward(backend, [photo(8, 24, 0)])
        assert forward(backend, [photo(8, 8, 0)])[0]["result"].shape == (1, 4)
    fixed = small_model(tmp_path / "fixed.onnx")
    with backend_of({**base, "model": fixed, "precision": "fp16", "precision::fp32": "conv, relu"}) as kept:
        assert forward(kept, [photo(8, 8, 0)])[0]["result"].shape == (1, 4)


# -- several instances, several threads ---------------------------------------------------------------------------


def gpu_pipeline(onnx: str) -> dict[str, Any]:
    size = {"resize_h": 224, "resize_w": 224, "color": "rgb"}
    return {
        "global": {"batching_timeout": 2},
        "gpu": {
            "backend": "S[DecodeTensor,ResizeTensor,cvtColorTensor,SyncTensor]",
            "DecodeTensor::max": 4,
            "instance_num": 2,
            "next": "cpu",
            **size,
        },
        "cpu": {
            "filter": "or",
            "backend": "S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor,SyncTensor]",
            "instance_num": 2,
            "next": "model",
            **size,
        },
        "model": resnet_config("resnet18", onnx, instance_num=4, postprocessor="SoftmaxMax"),
    }


def test_eight_threads_two_thousand_calls_each(resnet18: str) -> None:
    pytest.importorskip("torchvision")
    sizes = [(375, 500), (64, 48), (333, 777), (224, 224), (17, 23)]
    good = [jpeg(photo(*size, seed), quality=60 + seed) for seed, size in enumerate(sizes * 3)]
    cmyk = jpeg(photo(100, 90, 5), mode="CMYK")
    bad = [b"no image", good[0][:3000], b"\xff\xd8\xff", b"x" * 100]
    inputs = [*good, cmyk, *bad]
    with pipe(gpu_pipeline(resnet18)) as run:
        expected = [run({"data": data}).get("result") for data in inputs]
        assert [one is None for one in expected] == [False] * (len(good) + 1) + [True] * len(bad)
        wrong: list[str] = []

        def client(seed: int) -> None:
            order = np.random.default_rng(seed).integers(0, len(inputs), 2000).tolist()
            position = 0
            while position < len(order):
                count = 1 if position % 3 else 5  # single calls and lists
                chosen = order[position : position + count]
                items = [{"data": inputs[index]} for index in chosen]
                run(items if count > 1 else items[0])
                for index, item in zip(chosen, items, strict=False):
                    if item.get("result") != expected[index] or ("error" in item) == ("result" in item):
                        wrong.append(f"{index}: {item.get('result')} for {expected[index]}")
                position += count

        in_threads(8, client)
        assert wrong[:5] == []
        sizes_seen = run.stats()["nodes"]["model"]["batch_sizes"]
    assert len(sizes_seen) > 3, "batches of several sizes were run"


def test_building_and_closing_ten_times_keeps_no_memory(resnet18: str) -> None:
    pytest.importorskip("torchvision")
    data = jpeg(photo(375, 500, 0))
    used = []
    for _ in range(10):
        with pipe(gpu_pipeline(resnet18)) as run:
            for _ in range(5):
                run([{"data": data} for _ in range(8)])
        used.append(gpu_bytes())
    print("MiB in use after each:", [value >> 20 for value in used])
    assert used[-1] - used[2] < 32 << 20


# -- bad input ----------------------------------------------------------------------------------------------------


def test_out_of_gpu_memory_fails_alone() -> None:
    config = {"backend": "SyncTensor[ResizeTensor]", "resize_h": 2**20, "resize_w": 2**18}
    with pipe(config) as run:
        for _ in range(2):
            with pytest.raises(BackendError, match=r"(?i)out of memory"):
                run({"data": torch.zeros(1, 3, 8, 8, device="cuda")})
    assert torch.ones(4, device="cuda").sum().item() == 4.0


def test_error_names_what_tensorrt_refuses(tmp_path: Path) -> None:
    node = helper.make_node("Frobnicate", ["input"], ["output"], name="odd", domain="com.example")
    value = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3])  # noqa: E731
    graph = helper.make_graph([node], "odd", [value("input")], [value("output")])
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("com.example", 1)]
    path = str(tmp_path / "odd.onnx")
    save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    with pytest.raises(ConfigError, match=r"cannot take this ONNX model.*Frobnicate"):
        pipe({"backend": "TensorrtTensor", "model": path})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max": "4x3x9x9", "min": "1x3x9x9"}, "input 'input' is \\?x3x8x8, min sets 1x3x9x9"),
        ({"device_id": 64}, "device_id = 64: there are"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    config = {"backend": "TensorrtTensor", "model": small_model(tmp_path / "small.onnx"), **more}
    with pytest.raises(ConfigError, match=message):
        pipe(config)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_items_that_mix_are_refused(tmp_path: Path, precision: str) -> None:
    """A view that puts the batch into one row, as an engine knows it, and softmax over the batch, which only shows."""
    for node, output, problem in (
        (helper.make_node("Reshape", ["x", "to"], ["y"]), [1, "m"], "is 1x.* batch"),
        (helper.make_node("Softmax", ["x"], ["y"], axis=0), ["n", 6], "depends on the rest of its batch"),
    ):
        constants = {"to": np.array([1, -1])} if node.op_type == "Reshape" else None
        path = save_model(tmp_path / "mixes.onnx", [node], {"x": ["n", 6]}, {"y": output}, constants)
        with pytest.raises(ConfigError, match=problem):
            pipe({"backend": "TensorrtTensor", "model": path, "max": 4, "precision": precision})


# -- engine files and their cache ---------------------------------------------------------------------------------


def test_an_engine_file_is_a_model(tmp_path: Path) -> None:
    onnx, engine = small_model(tmp_path / "small.onnx"), str(tmp_path / "small.trt")
    results = []
    for keys in ({"model": onnx, "model::cache": engine}, {"model": engine}):
        with pipe({"backend": "TensorrtTensor", "max": 4, **keys}) as run:
            results.append(run({"data": photo(8, 8, 0)})["result"])
    assert torch.equal(*results)
    other = tmp_path / "junk.trt"
    other.write_bytes(b"junk" * 1000)
    with pytest.raises(ConfigError, match="cannot load this engine; engines fit one version of TensorRT"):
        pipe({"backend": "TensorrtTensor", "model": str(other)})
