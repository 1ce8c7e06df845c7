"""Calls of TensorRT that build an engine, and the use of their results; TensorRT is replaced."""

from __future__ import annotations

import enum
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import onnx
import pytest
from conftest import model_of
from onnx import TensorProto, helper

from torchpipe_py import BackendUnavailable, ConfigError
from torchpipe_py.backends.model.check import to_bounds
from torchpipe_py.backends.model.engine import build
from torchpipe_py.backends.model.engine.build import EngineSpec, cached_engine, new_engine
from torchpipe_py.backends.model.engine.precision import check_half, half_model, multiplying_layers
from torchpipe_py.encryption.model_file import REDACTED

Kind = enum.Enum("Kind", "CONVOLUTION DECONVOLUTION MATRIX_MULTIPLY QUANTIZE ACTIVATION")
Mode = enum.Enum("Mode", "INPUT OUTPUT")
GPU = "a GPU, compute capability 9.0"


def convolution(name: str, weights: str = "", tactic: str = "", tensors: str = "N/A due to dynamic shapes") -> Any:
    """A layer as TensorRT 8.6 tells it."""
    told: dict[str, Any] = {
        "Name": name,
        "LayerType": "CaskConvolution",
        "Inputs": [{"Name": "x", "Format/Datatype": tensors}],
        "Outputs": [{"Name": "y", "Format/Datatype": tensors}],
        "ParameterType": "Convolution",
        "TacticName": tactic,
    }
    return told | ({"Weights": {"Type": weights, "Count": 9408}} if weights else {})


HALF = convolution("conv1 + relu1", "Half")
FULL = convolution("conv2 + relu2", "Float")
NO_MATTER = {"Name": "Reformatting CopyNode", "LayerType": "Reformat", "Outputs": [{"Format/Datatype": "FP32"}]}


class FakeTensorrt:
    """The part of the module that a build uses. ``told``: the inspector's output for each engine, in turn."""

    def __init__(self, version: str, *told: list[Any], kinds: tuple[Kind, ...] = (Kind.CONVOLUTION,)) -> None:
        self.__version__ = version
        self.layers = [SimpleNamespace(name=kind.name, type=kind, precision=None, num_outputs=0) for kind in kinds]
        self.told = iter(told)
        self.flags: set[str] = set()
        self.builds: list[set[str]] = []
        self.runtimes: list[Any] = []
        self.parsed = b""
        self.float16, self.float32 = "float16", "float32"
        self.LayerType, self.TensorIOMode = Kind, Mode
        names = ["TF32", "VERSION_COMPATIBLE"]
        if version < "11" or version.startswith("8"):
            names += ["FP16", "INT8", "OBEY_PRECISION_CONSTRAINTS"]
        self.BuilderFlag = SimpleNamespace(**{name: name for name in names})
        self.NetworkDefinitionCreationFlag = SimpleNamespace()
        self.MemoryPoolType = SimpleNamespace(WORKSPACE=0)
        self.TacticSource = SimpleNamespace(CUBLAS=0, CUBLAS_LT=1, CUDNN=2)
        self.PreviewFeature = SimpleNamespace(PROFILE_SHARING_0806=0)
        self.ProfilingVerbosity = SimpleNamespace(DETAILED="detailed")
        self.LayerInformationFormat = SimpleNamespace(JSON="json")

    def init_libnvinfer_plugins(self, logger: Any, namespace: str) -> None: ...

    def Builder(self, logger: Any) -> Any:  # noqa: N802
        network = MagicMock(num_layers=len(self.layers), get_layer=self.layers.__getitem__, num_inputs=1)
        network.get_input.return_value = SimpleNamespace(name="x", shape=(-1, 3, 8, 8))
        self.flags = {"TF32"}
        config = MagicMock(set_flag=self.flags.add, clear_flag=self.flags.discard)
        config.get_tactic_sources.return_value = 7
        config.get_timing_cache.return_value = None

        def build_network(network: Any, config: Any) -> bytes:
            assert config.profiling_verbosity == "detailed"
            self.builds.append(self.flags)
            return b"plan %d" % len(self.builds)

        builder = MagicMock(build_serialized_network=build_network)
        builder.create_network.return_value, builder.create_builder_config.return_value = network, config
        return builder

    def OnnxParser(self, network: Any, logger: Any) -> Any:  # noqa: N802
        def parse(content: bytes) -> bool:
            self.parsed = content
            return True

        return SimpleNamespace(parse=parse)

    def Runtime(self, logger: Any) -> Any:  # noqa: N802
        told = next(self.told, [])
        context = SimpleNamespace(set_input_shape=lambda name, shape: shape == (4, 3, 8, 8))
        inspector = SimpleNamespace(get_engine_information=lambda form: json.dumps({"Layers": told}))
        engine = SimpleNamespace(
            num_io_tensors=2,
            get_tensor_name=lambda index: "xy"[index],
            get_tensor_mode=lambda name: Mode.INPUT if name == "x" else Mode.OUTPUT,
            get_tensor_profile_shape=lambda name, profile: [(1, 3, 8, 8), (4, 3, 8, 8), (4, 3, 8, 8)],
            create_execution_context=lambda: context,
            create_engine_inspector=lambda: inspector,
        )
        self.runtimes.append(SimpleNamespace(deserialize_cuda_engine=lambda content: engine))
        return self.runtimes[-1]


@pytest.fixture(autouse=True)
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.api, "messages", lambda trt: MagicMock())


def small(scale: float = 1.0, op: str = "Conv") -> bytes:
    """Conv 3×3, ReLU and a mean, weights of about ``scale``; or with a QuantizeLinear before it."""
    weight = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32) * scale
    constants: dict[str, Any] = {"weight": weight}
    nodes = [
        helper.make_node("Conv", ["x", "weight"], ["mapped"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["mapped"], ["positive"], name="relu"),
        helper.make_node("GlobalAveragePool", ["positive"], ["y"], name="mean"),
    ]
    if op == "QuantizeLinear":
        constants |= {"scale": np.float32(0.1), "zero": np.int8(0)}
        nodes[0].input[0] = "steps"
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["quantised"]),
            helper.make_node("DequantizeLinear", ["quantised", "scale", "zero"], ["steps"]),
            *nodes,
        ]
    return bytes(model_of(nodes, {"x": ["n", 3, 8, 8]}, {"y": ["n", 4, 1, 1]}, constants).SerializeToString())


SPEC = EngineSpec(model="m.onnx", onnx=small(), least=to_bounds(1), most=to_bounds(4))


def weight_type(content: bytes) -> int:
    (weight,) = [each for each in onnx.load_from_string(content).graph.initializer if len(each.dims) == 4]
    return int(weight.data_type)


# -- what layers say ----------------------------------------------------------------------------------------------


GEMM = "sm90_xmma_fprop_implicit_gemm"


@pytest.mark.parametrize(
    ("told", "precision"),
    [
        (convolution("a", "Half"), "fp16"),
        (convolution("a", "Float", f"{GEMM}_f32f32_tf32f32_f32_nhwckrsc_nhwc"), "fp32"),
        (convolution("a", "Int8"), "int8"),
        (convolution("a", "", f"{GEMM}_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize64x32x64"), "fp16"),
        (convolution("a", "", f"{GEMM}_interleaved_i8f32_i8i32_f32_n"), "int8"),
        (convolution("a", "", "sm80_xmma_gemm_bf16bf16_bf16f32_f32"), "bf16"),
        (convolution("a", "", "", "Channel major FP16 format where channel % 8 == 0"), "fp16"),
        ({"Name": "a", "LayerType": "gemm", "Inputs": [{"DataType": "Half", "Format": "kLINEAR"}]}, "fp16"),
    ],
)
def test_reads_precision_of_each_layer(told: Any, precision: str) -> None:
    trt = FakeTensorrt("8.6.0", [told, NO_MATTER, "a name alone", convolution("says nothing")])
    engine = trt.Runtime(None).deserialize_cuda_engine(b"")
    layers = multiplying_layers(trt, engine, {"x": (4, 3, 8, 8)})
    assert [(layer.name, layer.precision) for layer in layers] == [("a", precision)]


def test_no_message_names_layers_of_an_encrypted_model(caplog: pytest.LogCaptureFixture) -> None:
    cipher: Any = "the model's"
    spec = replace(SPEC, cipher=cipher)
    new_engine(FakeTensorrt("8.6.0", [HALF, FULL]), spec, None)
    with pytest.raises(ConfigError, match=f"no layer of the engine .*{REDACTED}"):
        new_engine(FakeTensorrt("8.6.0", [FULL], [FULL]), spec, None)
    with pytest.raises(ConfigError, match="3 layers read or write numbers beyond 65504"):
        new_engine(FakeTensorrt("11.4.0"), replace(spec, onnx=small(3e4)), None)
    assert f"1 of 2 layers run otherwise: {REDACTED}" in caplog.text
    assert "conv" not in caplog.text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, [HALF, NO_MATTER]),
        ({"fp32_layers": ("relu2",)}, [HALF, FULL]),
        ({"precision": "best"}, [HALF, FULL]),
        ({}, []),
    ],
)
def test_logs_nothing_if_all_layers_run_as_requested(change: Any, told: Any, caplog: pytest.LogCaptureFixture) -> None:
    trt = FakeTensorrt("8.6.0", told)
    trt.layers[0].name = "relu2"
    new_engine(trt, replace(SPEC, **change), None)
    assert [record for record in caplog.records if "run otherwise" in record.getMessage()] == []
    with pytest.raises(ConfigError, match="no layer 'konv'"):
        new_engine(FakeTensorrt("8.6.0", told), replace(SPEC, fp32_layers=("konv",)), None)


def test_demands_fp16_if_tensorrt_chose_fp32_for_all() -> None:
    trt = FakeTensorrt("8.6.0", [FULL], [HALF], kinds=(Kind.CONVOLUTION, Kind.ACTIVATION))
    _, content = new_engine(trt, SPEC, None)
    assert content == b"plan 2"
    assert trt.builds == [{"TF32", "FP16"}, {"TF32", "FP16", "OBEY_PRECISION_CONSTRAINTS"}]
    assert [layer.precision for layer in trt.layers] == ["float16", None]


def test_an_engine_without_the_precision_is_refused_and_not_kept(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="m.onnx: precision = fp16, but no layer of the engine that TensorRT 8.6.0 built runs in it: "
        r"conv2 \+ relu2 in fp32; set precision = fp32",
    ):
        cached_engine(FakeTensorrt("8.6.0", [FULL], [FULL]), SPEC, str(tmp_path / "m.trt"), GPU)
    assert not (tmp_path / "m.trt").exists()


def test_int8_needs_a_quantised_model_which_any_precision_allows_it() -> None:
    with pytest.raises(ConfigError, match="precision = int8 needs a quantised model"):
        new_engine(FakeTensorrt("8.6.0"), replace(SPEC, precision="int8"), None)
    quantised = (Kind.QUANTIZE, Kind.CONVOLUTION)
    for precision in ("fp16", "fp32", "int8", "best"):
        trt = FakeTensorrt("8.6.0", [convolution("conv", "Int8")], kinds=quantised)
        new_engine(trt, replace(SPEC, precision=precision), None)
        assert "INT8" in trt.builds[0]
    with pytest.raises(ConfigError, match="precision = int8, but no layer"):
        new_engine(FakeTensorrt("8.6.0", [HALF], kinds=quantised), replace(SPEC, precision="int8"), None)


# -- strongly typed networks --------------------------------------------------------------------------------------


def test_a_strongly_typed_network_is_given_an_fp16_model() -> None:
    trt = FakeTensorrt("11.4.0", [HALF])
    new_engine(trt, SPEC, None)
    assert weight_type(trt.parsed) == TensorProto.FLOAT16
    assert trt.builds == [{"TF32"}]
    with pytest.raises(ConfigError, match=r"no layer of the engine that TensorRT 11\.4\.0 built runs in it"):
        new_engine(FakeTensorrt("11.4.0", [FULL]), SPEC, None)


def test_a_strongly_typed_network_takes_fp32_and_quantised_models_as_they_are() -> None:
    trt = FakeTensorrt("11.4.0", [FULL])
    new_engine(trt, replace(SPEC, precision="fp32"), None)
    assert trt.parsed == SPEC.onnx
    assert trt.builds == [set()]
    trt = FakeTensorrt("11.4.0", [convolution("conv", "Int8")], kinds=(Kind.QUANTIZE,))
    new_engine(trt, quantised := replace(SPEC, onnx=small(op="QuantizeLinear")), None)
    assert trt.parsed == quantised.onnx


def test_a_model_that_overflows_in_fp16_is_refused() -> None:
    trt, spec = FakeTensorrt("11.4.0", [HALF, FULL]), replace(SPEC, onnx=small(3e4))
    with pytest.raises(ConfigError, match=r"conv, relu, mean read or write numbers beyond 65504, .* precision::fp32"):
        new_engine(trt, spec, None)
    assert trt.builds == []
    new_engine(trt, replace(spec, fp32_layers=("conv", "relu", "mean")), None)
    assert weight_type(trt.parsed) == TensorProto.FLOAT


def test_warns_of_or_refuses_fp16_model_that_differs(caplog: pytest.LogCaptureFixture) -> None:
    def check(scale: float) -> None:
        check_half("m.onnx", SPEC.onnx, half_model(small(scale), ()), (), to_bounds(1), is_normalised=True)

    check(1.0)
    assert caplog.records == []
    check(1.05)
    assert "m.onnx: output 'y' differs by 0.05 of itself in fp16" in caplog.text
    with pytest.raises(ConfigError, match="output 'y' is wrong in fp16, by 1 of itself; name the layers that need"):
        check(2.0)


# -- version-compatible engines -----------------------------------------------------------------------------------


def test_a_version_compatible_engine_is_built_so_and_may_run_its_code(tmp_path: Path) -> None:
    spec, path = replace(SPEC, version_compatible=True), str(tmp_path / "m.trt")
    old = FakeTensorrt("8.6.0", [HALF])
    cached_engine(old, spec, path, GPU)
    assert "VERSION_COMPATIBLE" in old.builds[0]
    for version in ("8.6.1", "10.16.1.11"):
        newer = FakeTensorrt(version)
        cached_engine(newer, spec, path, GPU)
        assert newer.builds == []
        assert newer.runtimes[0].engine_host_code_allowed
    oldest = FakeTensorrt("8.5.3", [HALF])
    cached_engine(oldest, spec, path, GPU)
    assert len(oldest.builds) == 1


def test_another_engine_runs_no_code_and_fits_one_version(tmp_path: Path) -> None:
    path = str(tmp_path / "m.trt")
    cached_engine(FakeTensorrt("8.6.0", [HALF]), SPEC, path, GPU)
    newer = FakeTensorrt("10.16.1.11", [HALF])
    cached_engine(newer, SPEC, path, GPU)
    assert len(newer.builds) == 1
    assert "VERSION_COMPATIBLE" not in newer.builds[0]
    assert not hasattr(newer.runtimes[0], "engine_host_code_allowed")


def test_lean_runtime_runs_engine_of_full_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, path = replace(SPEC, version_compatible=True), str(tmp_path / "m.trt")
    lean = FakeTensorrt("10.16.1.11")
    monkeypatch.delattr(FakeTensorrt, "init_libnvinfer_plugins")
    with monkeypatch.context() as patch:
        patch.delattr(FakeTensorrt, "Builder")
        with pytest.raises(BackendUnavailable, match=r"there is no engine yet; the lean runtime .* builds no engine"):
            cached_engine(lean, spec, path, GPU)
        with pytest.raises(BackendUnavailable, match=r"the lean runtime of TensorRT 10\.16\.1\.11 builds no engine"):
            cached_engine(lean, spec, "", GPU)
    monkeypatch.setattr(FakeTensorrt, "init_libnvinfer_plugins", lambda *_: None, raising=False)
    cached_engine(FakeTensorrt("8.6.0", [HALF]), spec, path, GPU)
    monkeypatch.delattr(FakeTensorrt, "init_libnvinfer_plugins")
    monkeypatch.delattr(FakeTensorrt, "Builder")
    cached_engine(lean, spec, path, GPU)
    assert lean.builds == []
