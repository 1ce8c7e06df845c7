"""``torchpipe doctor``: installed libraries, and missing ones by feature."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torchpipe_py
from torchpipe_py.cores import usable_cores
from torchpipe_py.tools.report import aligned, write_json

REQUIRED = "required"

LIBRARIES = (
    # import name, distribution, extra that includes it, purpose
    ("numpy", "numpy", REQUIRED, "arrays"),
    ("torch", "torch", REQUIRED, "Tensors, TorchTensor"),
    ("cv2", "opencv-python-headless", REQUIRED, "decoding and resizing on the CPU"),
    ("PIL", "pillow", REQUIRED, "PillowResize…, headers of images"),
    ("onnx", "onnx", REQUIRED, "reading ONNX models"),
    ("onnxruntime", "onnxruntime", REQUIRED, "OnnxTensor"),
    ("tomli", "tomli", REQUIRED, "configurations"),
    ("thriftpy2", "thriftpy2", "server", "torchpipe-serve, torchpipe_client"),
    ("httptools", "httptools", "server", "HTTP"),
    ("msgspec", "msgspec", "server", "JSON bodies"),
    ("uvloop", "uvloop", "server", "a faster event loop; asyncio's is used without it"),
    ("prometheus_client", "prometheus_client", "server", "/metrics"),
    ("psutil", "psutil", "server", "torchpipe load"),
    ("grpc", "grpcio", "grpc", "--grpc-port"),
    ("google.protobuf", "protobuf", "grpc", "--grpc-port"),
    ("tensorrt", "tensorrt", "tensorrt", "TensorrtTensor: building and running engines"),
    ("tensorrt_lean", "tensorrt-lean-cu13-bindings", "", "TensorrtTensor: running version-compatible engines"),
    ("torchvision", "torchvision", "", "torchpipe export NAME, decoding by nvJPEG"),
    ("nvidia.nvimgcodec", "nvidia-nvimgcodec-cu13", "gpu", "decoding on the GPU with OpenCV's pixels"),
    ("simplejpeg", "simplejpeg", "server", "decoding JPEGs faster on the CPU; their check before a GPU decodes them"),
    ("cryptography", "cryptography", "encryption", "encrypted models"),
    ("opentelemetry.sdk", "opentelemetry-sdk", "otel", "tracing"),
    ("av", "av", "video", "reading video files and cameras; OpenCV does without it"),
    ("pyarrow", "pyarrow", "parquet", "torchpipe run --out x.parquet"),
    ("PyNvVideoCodec", "pynvvideocodec", "", "decoding streams on a GPU"),
    ("lmdb", "lmdb", "train", "LmdbImages"),
    ("nvidia.dali", "nvidia-dali-cuda130", "dali", "scripts: training on images that DALI loads"),
    ("pycuda", "pycuda", "pycuda", "scripts: the locked baseline of the benchmarks"),
    ("ray", "ray", "ray", "Ray Serve and Ray Data"),
)

DEPENDENCIES = [module for module, _, extra, _ in LIBRARIES if extra == REQUIRED]
"""Import names of the libraries that come with the package, unless ``pip install --no-deps`` left them out."""


@dataclass(frozen=True)
class Library:
    """One library: its version, ``""`` if it is missing; ``problem`` says why it cannot be imported."""

    name: str
    version: str
    problem: str
    extra: str
    purpose: str

    @property
    def remedy(self) -> str:
        """The command that installs it, or its problem; ``""`` if it works."""
        if self.problem:
            return f"cannot be imported: {self.problem}"
        if self.version:
            return ""
        if self.extra in ("", REQUIRED):
            return f"pip install {self.name}"
        return f"pip install 'torchpipe_py[{self.extra}]'"


def run_doctor(args: Any) -> int:
    """Print the report; 0 if every required library works and ``--pixels`` finds no difference, else 1."""
    report = examine()
    libraries: list[Library] = report["libraries"]
    print(f"torchpipe_py {report['version']}, Python {report['python']}, {report['system']}")
    print(f"cores: {report['cores']} of {report['cores_online']} (affinity and CPU quota)")
    print(f"GPU: {report['gpu']}")
    print(f"decoders: {', '.join(report['decoders'])}")
    print(f"ONNX Runtime providers: {', '.join(report['providers']) or 'none'}")
    print()
    rows = [
        (entry.name, entry.version or "-", ": ".join(filter(None, (entry.purpose, entry.remedy))))
        for entry in libraries
    ]
    print("\n".join(aligned(rows, ("library", "version", "for"))))
    is_broken = any(entry.extra == REQUIRED and entry.remedy for entry in libraries)
    findings = _print_pixels() if args.pixels and not is_broken else []
    if args.json is not None:
        shown = {"pixels": [{**each._asdict(), "verdict": each.verdict} for each in findings]} if args.pixels else {}
        write_json(args.json, {**report, "libraries": [asdict(entry) for entry in libraries], **shown})
    return int(is_broken or any(each.verdict == "differs" for each in findings))


def _print_pixels() -> list[Any]:
    """The differences between the pixels that come out here and those that should, largest and mean in levels."""
    from torchpipe_py.tools.pixel_check import check_pixels

    findings = check_pixels()
    rows = [
        (f"{each.part}: {each.what}", each.verdict, f"{each.largest:.2f}", f"{each.mean:.3f}", each.reference)
        for each in findings
    ]
    print()
    print("\n".join(aligned(rows, ("pixels", "", "largest", "mean", "difference from"))))
    return findings


def examine() -> dict[str, Any]:
    """The report as data; ``libraries`` is a list of ``Library``."""
    libraries = [_library(*entry) for entry in LIBRARIES]
    working = {entry.name for entry in libraries if entry.version and not entry.problem}
    providers = sys.modules["onnxruntime"].get_available_providers() if "onnxruntime" in working else ()
    return {
        "version": torchpipe_py.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": usable_cores(),
        "cores_online": os.cpu_count() or 1,
        "gpu": _gpu() if "torch" in working else "unknown, torch is missing",
        "decoders": list(_decoders(working)),
        "providers": [name.removesuffix("ExecutionProvider") for name in providers],
        "libraries": libraries,
    }


def _library(module: str, distribution: str, extra: str, purpose: str) -> Library:
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    problem = ""
    try:
        imported = importlib.import_module(module)
        version = version or str(getattr(imported, "__version__", ""))
    except ModuleNotFoundError as error:
        if version:
            problem = str(error)
    except Exception as error:  # a broken library may raise anything, such as a torchvision for another PyTorch
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Library(distribution, version, problem, extra, purpose)


def _gpu() -> str:
    torch = sys.modules["torch"]
    if not torch.cuda.is_available():
        return "none that PyTorch can use"
    names = [
        f"{torch.cuda.get_device_name(index)} {torch.cuda.get_device_properties(index).total_memory >> 30} GiB"
        for index in range(torch.cuda.device_count())
    ]
    return f"{', '.join(names)}; CUDA {torch.version.cuda}"


def _decoders(working: set[str]) -> Iterator[str]:
    if "opencv-python-headless" in working:
        yield "DecodeMat (CPU)"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        checked = "" if "simplejpeg" in working else ", simplejpeg is missing for the check"
        if "nvidia-nvimgcodec-cu13" in working:
            yield f"DecodeTensor by nvImageCodec{checked}"
        if "torchvision" in working:
            yield f"DecodeTensor by torchvision{checked}"
