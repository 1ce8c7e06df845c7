"""Export a torchvision classification model to a single ONNX file with a dynamic batch, and check it.

    python scripts/export_onnx.py --arch resnet50 --out resnet50.onnx

The graph takes ``input`` (float32, N×3×size×size, already normalised) and gives ``logits`` (float32, N×classes).
A pipeline writes ``mean`` and ``std`` into the graph itself when it loads the model, so they are not exported.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import logging
import socket
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch

PROTOBUF_LIMIT = 2**31  # bytes; a single ONNX file cannot be larger
DOWNLOAD_TIMEOUT = 10.0  # seconds without a byte
DYNAMO_MIN_OPSET = 18  # torch's newer exporter writes nothing older

Axes = dict[str, dict[int, str]]  # tensor → dimension → the name under which it is free
Size = int | tuple[int, int]  # pixels: the side of a square, or height and width
BATCH_AXES: Axes = {"input": {0: "batch"}, "logits": {0: "batch"}}


class ExportError(Exception):
    """The model cannot be exported as asked; the message is one line meant for the user."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's deprecation, tracing and operator notes, which say nothing about the result."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _plain_attention() -> Iterator[None]:
    """The fused multi-head attention of eval mode has no ONNX counterpart; the unfused one has."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """``torch.hub`` opens URLs without a time limit; this gives it one."""
    previous = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(previous)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


# --- model to file -----------------------------------------------------------------------------------------------


def _export_traced(model: torch.nn.Module, path: Path, example: torch.Tensor, opset: int, axes: Axes) -> None:
    """The TorchScript exporter: needs no onnxscript and keeps the opset asked for."""
    torch.onnx.export(
        model,
        (example,),
        str(path),
        dynamo=False,
        opset_version=opset,
        input_names=["input"],
        output_names=["logits"],
        dynamic_axes=axes,
    )


def _export_dynamo(model: torch.nn.Module, path: Path, example: torch.Tensor, opset: int, axes: Axes) -> None:
    """The ``torch.export`` exporter: needs onnxscript."""
    # NOTE: only the batch is named; a named width would have to state its multiple, which AUTO finds out
    free = {
        axis: torch.export.Dim(name) if axis == 0 else torch.export.Dim.AUTO for axis, name in axes["input"].items()
    }
    torch.onnx.export(
        model,
        (example,),
        str(path),
        dynamo=True,
        opset_version=max(opset, DYNAMO_MIN_OPSET),
        input_names=["input"],
        output_names=["logits"],
        dynamic_shapes=(free,),
        external_data=False,
        verbose=False,
    )


def _exporters() -> list[Callable[[torch.nn.Module, Path, torch.Tensor, int, Axes], None]]:
    """In order of preference; the second is for a torch that has dropped the first, or an operator it lacks."""
    has_onnxscript = importlib.util.find_spec("onnxscript") is not None
    return [_export_traced, _export_dynamo] if has_onnxscript else [_export_traced]


def parameter_bytes(model: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def _sides(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def save_onnx(model: torch.nn.Module, path: Path, size: Size, opset: int, axes: Axes = BATCH_AXES) -> None:
    """Write ``model`` (put in eval mode) to ``path``, weights inside.

    The input is ``input``, float32 N×3×height×width; the output is ``logits``; ``axes`` are their free dimensions.
    Raises ``ExportError`` if no exporter of this torch can do it.
    """
    if parameter_bytes(model) >= PROTOBUF_LIMIT:
        raise ExportError("the weights exceed 2 GiB, more than a single ONNX file can hold")
    model.eval()
    example = torch.zeros(2, 3, *_sides(size))  # NOTE: 2, since the newer exporter takes a batch of 1 for a constant
    failures = []
    for exporter in _exporters():
        try:
            with _quiet(), _plain_attention(), torch.no_grad():
                exporter(model, path, example, opset, axes)
            return
        except Exception as error:
            failures.append(_one_line(error))
    raise ExportError(f"torch {torch.__version__} cannot export this model: {' / then '.join(failures)}")


# --- file against model ------------------------------------------------------------------------------------------


def open_session(path: Path, threads: int = 0) -> onnxruntime.InferenceSession:
    """A CPU session; ``threads`` 0 leaves the number to ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors only
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def max_difference(model: torch.nn.Module, path: Path, size: Size, batches: Sequence[int]) -> tuple[float, float]:
    """As ``compare_logits``, over Gaussian inputs of these batch sizes."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(batch, 3, *_sides(size), generator=generator) for batch in batches]
    return compare_logits(model.eval(), open_session(path), inputs)


def compare_logits(
    model: Callable[[torch.Tensor], torch.Tensor], session: Any, inputs: Iterable[torch.Tensor]
) -> tuple[float, float]:
    """The logits' largest absolute difference, PyTorch to ONNX Runtime, and largest magnitude."""
    worst = scale = 0.0
    for images in inputs:
        with torch.inference_mode():
            expected = model(images)
        (actual,) = session.run(["logits"], {"input": images.numpy()})
        difference = (expected - torch.from_numpy(actual)).abs().max().item()
        if not difference <= worst:  # NOTE: written so that NaN is kept
            worst = difference
        scale = max(scale, expected.abs().max().item())
    return worst, scale


def export_checked(
    model: torch.nn.Module,
    path: Path,
    *,
    size: Size,
    opset: int,
    batches: Sequence[int],
    tolerance: float,
    axes: Axes = BATCH_AXES,
) -> float:
    """``save_onnx``, then compare at every batch size; returns the largest absolute difference.

    Raises ``ExportError`` if that exceeds ``tolerance`` (times the largest logit where that is below 1, or tiny logits
    would pass whatever they are), is not a number, or the file does not run at some batch size.
    """
    save_onnx(model, path, size, opset, axes)
    try:
        difference, scale = max_difference(model, path, size, batches)
    except Exception as error:
        raise ExportError(f"{path} was written but fails to run: {_one_line(error)}") from error
    limit = tolerance * min(1.0, scale)
    if not difference <= limit:
        raise ExportError(f"{path} differs from PyTorch by {difference:.2g}, more than {limit:.2g}")
    return difference


# --- torchvision -------------------------------------------------------------------------------------------------


def _torchvision_models() -> Any:
    """``torchvision.models``. A torchvision built for another torch fails at import with almost any exception."""
    try:
        import torchvision.models as models
    except Exception as error:
        raise ExportError(
            f"torchvision cannot be imported ({_one_line(error)}); "
            f"install the build made for torch {torch.__version__}: "
            f"pip install torchvision 'torch=={torch.__version__.partition('+')[0]}'"
        ) from error
    return models


def _check_arch(models: Any, arch: str) -> None:
    names = models.list_models(module=models)
    if arch in names:
        return
    nearest = difflib.get_close_matches(arch.lower(), names, n=3, cutoff=0.3)
    hint = f"nearest: {', '.join(nearest)}" if nearest else f"for example: {', '.join(names[:3])}"
    raise ExportError(f"torchvision has no classification model {arch!r}; {hint}")


def _untrained_model(models: Any, arch: str, **options: Any) -> torch.nn.Module:
    with _quiet():
        return models.get_model(arch, weights=None, **options)


def _fill_zero_heads(model: torch.nn.Module) -> None:
    """A vision transformer's untrained classifier is all zeros, which would compare equal to anything broken."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and not module.weight.any():
            torch.nn.init.normal_(module.weight, std=0.02)


def _settle_batch_norm(model: torch.nn.Module, size: int) -> None:
    """Take batch-norm statistics from noise: without any, random activations shrink layer by layer towards zero."""
    norms = [module for module in model.eval().modules() if isinstance(module, torch.nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train().momentum = 1.0
    with torch.no_grad():
        model(torch.randn(4, 3, size, size))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval().momentum = momentum


def _pretrained_model(models: Any, arch: str) -> tuple[torch.nn.Module, str]:
    try:
        with _quiet(), _socket_timeout(DOWNLOAD_TIMEOUT):
            return models.get_model(arch, weights="DEFAULT"), "pretrained"
    except (OSError, RuntimeError) as error:
        print(
            f"WARNING: NO PRETRAINED WEIGHTS for {arch} ({_one_line(error)}); USING RANDOM ONES: "
            "fine for measuring speed, but the labels are meaningless",
            file=sys.stderr,
        )
        return _untrained_model(models, arch), "random"


def _model_from_file(models: Any, arch: str, path: Path) -> torch.nn.Module:
    """A fine-tuned model: its number of classes is read from the last tensor, the classifier's."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        state = state.get("state_dict", state)
        classes = list(state.values())[-1].shape[0]
        model = _untrained_model(models, arch, num_classes=classes)
        model.load_state_dict(state)
    except Exception as error:
        raise ExportError(f"{path} holds no state_dict of {arch}: {_one_line(error)}") from error
    return model


def build_model(arch: str, weights: str) -> tuple[torch.nn.Module, str]:
    """The model and a word for its weights. ``weights`` is ``auto``, ``random`` or the path of a state_dict."""
    models = _torchvision_models()
    _check_arch(models, arch)
    if weights == "auto":
        return _pretrained_model(models, arch)
    if weights == "random":
        return _untrained_model(models, arch), "random"
    return _model_from_file(models, arch, Path(weights)), weights


def _check_size(model: torch.nn.Module, arch: str, size: int) -> None:
    try:
        with torch.inference_mode():
            model.eval()(torch.zeros(1, 3, size, size))
    except Exception as error:
        raise ExportError(f"{arch} does not take {size}×{size} images: {_one_line(error)}") from error


def export_arch(arch: str, out: Path, *, size: int, weights: str, opset: int) -> str:
    """Build, export and check one architecture; returns the summary. Raises ``ExportError``."""
    model, kind = build_model(arch, weights)
    _check_size(model, arch, size)
    if kind == "random":
        _fill_zero_heads(model)
        _settle_batch_norm(model, size)
    out.parent.mkdir(parents=True, exist_ok=True)
    batches = (1, 3)
    difference = export_checked(model, out, size=size, opset=opset, batches=batches, tolerance=1e-3)
    written = next(entry.version for entry in onnx.load(out).opset_import if entry.domain in ("", "ai.onnx"))
    return (
        f"{out}: {arch}, {kind} weights, input N×3×{size}×{size}, opset {written}, {out.stat().st_size / 1e6:.1f} MB; "
        f"max difference from PyTorch at batches {', '.join(map(str, batches))}: {difference:.2g}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", required=True, help="a torchvision classification model, for example resnet50")
    parser.add_argument("--out", type=Path, help="ONNX file to write (default: ARCH.onnx)")
    parser.add_argument("--size", type=int, default=224, help="image height and width in pixels (default: %(default)s)")
    parser.add_argument("--weights", default="auto", help="auto, random, or a state_dict's path (default: %(default)s)")
    parser.add_argument("--opset", type=int, default=17, help="ONNX opset (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of random weights (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0 when written and checked, 2 with one line on stderr otherwise."""
    args = _parser().parse_args(argv)
    torch.manual_seed(args.seed)
    out = args.out or Path(f"{args.arch}.onnx")
    try:
        print(export_arch(args.arch, out, size=args.size, weights=args.weights, opset=args.opset))
    except ExportError as error:
        print(f"export_onnx: {error}", file=sys.stderr)
        return 2
    return 0
