"""Writes a PyTorch module of images as one ONNX file with a dynamic batch, and compares the two."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from torchpipe_py.backends.model.onnx_graph import keep_telemetry_off
from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.errors import describe
from torchpipe_py.tools.compare_models.figures import largest_difference
from torchpipe_py.tools.report import ToolError

PROTOBUF_LIMIT = 2**31  # bytes; a single ONNX file cannot be larger
DYNAMO_MIN_OPSET = 18  # the oldest that torch's newer exporter writes
OPSET = 17
TOLERANCE = 1e-3  # of the largest output
BATCHES = (1, 3, 7)

Axes = dict[str, dict[int, str]]  # tensor → dynamic dimension → its name
Size = int | tuple[int, int] | tuple[int, int, int]
"""Pixels: the side of a square, or height and width; or channels (if not three), height and width."""

BATCH_AXES: Axes = {"input": {0: "batch"}, "logits": {0: "batch"}}


def one_line(error: BaseException) -> str:
    """Type and message of an exception on one line, at most 200 characters."""
    return " ".join(describe(error, 200).split())


def save_onnx(model: Any, path: Path, size: Size, opset: int = OPSET, axes: Axes = BATCH_AXES) -> None:
    """Write ``model``, which is set to eval mode, with its weights to ``path``.

    The input is ``input``, float32 N×C×H×W; ``axes`` lists it and the outputs, in order, with their dynamic
    dimensions. Raises ``ToolError`` if no exporter of this PyTorch can do it.
    """
    import torch

    if sum(tensor.nbytes for tensor in model.state_dict().values()) >= PROTOBUF_LIMIT:
        raise ToolError("the weights exceed 2 GiB, more than a single ONNX file can hold")
    model.eval()
    example = torch.zeros(2, *_shape(size))  # NOTE: 2, since the newer exporter treats a batch of 1 as a constant
    names = {"input_names": ["input"], "output_names": [name for name in axes if name != "input"]}
    # Only the batch is named; a named width would have to state its divisor, which AUTO finds.
    free = {at: torch.export.Dim(name) if at == 0 else torch.export.Dim.AUTO for at, name in axes["input"].items()}
    # The TorchScript exporter needs no onnxscript and keeps the given opset; the one of torch.export is for operators
    # that it lacks, and for a PyTorch without it.
    traced: dict[str, Any] = {"dynamo": False, "opset_version": opset, "dynamic_axes": axes}
    exported = {"dynamo": True, "opset_version": max(opset, DYNAMO_MIN_OPSET), "dynamic_shapes": (free,)}
    exported |= {"external_data": False, "verbose": False}
    has_onnxscript = importlib.util.find_spec("onnxscript") is not None
    failures = []
    for settings in (traced, exported) if has_onnxscript else (traced,):
        try:
            with _exporting():
                torch.onnx.export(model, (example,), str(path), **names, **settings)
            return
        except Exception as error:
            failures.append(one_line(error))
    if len(failures) == 1:
        failures.append("the newer exporter may support it, but needs onnxscript (pip install onnxscript)")
    raise ToolError(f"torch {torch.__version__} cannot export this model: {'; '.join(failures)}")


def open_session(path: Path, threads: int = 0) -> Any:
    """A session of ONNX Runtime on the CPU; with ``threads`` 0 it chooses the number."""
    keep_telemetry_off()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors only
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def noise(size: Size, batches: Sequence[int]) -> list[Any]:
    """Normalised images: Gaussian noise in batches of these sizes, then black, white, gray and a checkerboard."""
    import torch

    generator = torch.Generator().manual_seed(0)
    channels, height, width = _shape(size)
    images = [torch.randn(batch, channels, height, width, generator=generator) for batch in batches]
    checked = 5.0 * ((torch.arange(height)[:, None] + torch.arange(width)) % 2).float() - 2.5
    plain = torch.tensor([-2.5, 2.5, 0.0])[:, None, None, None].expand(3, channels, height, width)
    return [*images, torch.cat([plain, checked.expand(1, channels, height, width)])]


def outputs_of(model: Callable[[Any], Any], images: Any) -> list[Any]:
    """A module's outputs for a batch; ``ToolError`` unless they are a Tensor or a tuple or list of Tensors."""
    import torch

    with torch.inference_mode():
        outputs = model(images)
    several = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    for output in several:
        if not isinstance(output, torch.Tensor):
            raise ToolError(f"forward returns a {type(output).__name__}; expected a Tensor, or a tuple of Tensors")
    return several


def compare_outputs(model: Callable[[Any], Any], session: Any, inputs: Iterable[Any]) -> tuple[float, float]:
    """The largest absolute difference between PyTorch's and ONNX Runtime's outputs, and the largest magnitude."""
    worst = scale = 0.0
    for images in inputs:
        served = session.run(None, {"input": images.numpy()})
        for expected, actual in zip(outputs_of(model, images), served, strict=True):
            if tuple(expected.shape) != actual.shape:
                shapes = f"{shown_dims(expected.shape)} in PyTorch, {shown_dims(actual.shape)} in ONNX"
                raise ToolError(f"an output is {shapes}")
            difference, largest = largest_difference(expected.double().numpy(), actual)
            worst, scale = float(np.maximum(worst, difference)), max(scale, largest)  # NOTE: NaN is kept
    return worst, scale


def export_checked(
    model: Any,
    path: Path,
    *,
    size: Size,
    opset: int = OPSET,
    batches: Sequence[int] = BATCHES,
    tolerance: float = TOLERANCE,
    axes: Axes = BATCH_AXES,
) -> tuple[float, float]:
    """``save_onnx``, then compare at every batch size; returns the largest absolute difference and largest output.

    Raises ``ToolError`` if that exceeds ``tolerance`` times the largest output, is not a number, or the file does not
    run at some batch size.
    """
    save_onnx(model, path, size, opset, axes)
    try:
        difference, scale = compare_outputs(model.eval(), open_session(path), noise(size, batches))
    except ToolError:
        raise
    except Exception as error:
        why = f"does not run at batches of {', '.join(map(str, batches))}: {one_line(error)}"
        hint = "forward may contain a fixed batch size: use x.flatten(1), not x.view(4, -1)"
        raise ToolError(f"{path.name} {why}; {hint}") from error
    if not difference <= tolerance * scale:  # NOTE: in this form it also refuses NaN
        raise ToolError(f"{path.name} differs from PyTorch by {difference:.2g}, of {scale:.2g} at most")
    return difference, scale


def check_batch(model: Any, size: Size) -> list[Any]:
    """The outputs for a batch of three; ``ToolError`` if they differ from those of single images."""
    (images,) = noise(size, (3,))[:1]
    try:
        outputs = outputs_of(model.eval(), images)
        single = [outputs_of(model, images[index : index + 1]) for index in range(3)]
    except ToolError:
        raise
    except Exception as error:
        why = f"the model does not take images of {shown_dims(images.shape[1:])}: {one_line(error)}"
        hint = "give its size with --resize HxW, and --color gray for one channel"
        raise ToolError(f"{why}; {hint}") from error
    for index, output in enumerate(outputs):
        if not output.ndim or len(output) != 3:
            raise ToolError(f"output {index} is {shown_dims(output.shape)} for a batch of 3; it must begin with 3")
        if not bool(output.isfinite().all()):
            raise ToolError(f"output {index} holds NaN or infinity for random images: are the weights complete?")
        for row, alone in zip(output, single, strict=True):
            difference, scale = largest_difference(row[None].double().numpy(), alone[index].double().numpy())
            if not difference <= TOLERANCE * scale:
                apart = f"{difference:.2g} apart, of {scale:.2g}"
                raise ToolError(f"output {index} of an image depends on the others of its batch: {apart}")
    return outputs


@contextmanager
def quiet(name: str = "torch.onnx") -> Iterator[None]:
    """Silence an exporter's deprecation, tracing and operator notes, which do not affect the result."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _exporting() -> Iterator[None]:
    """The context for PyTorch's exporters: no gradients, no output, no fused attention.

    Fused multi-head attention has no ONNX counterpart. On failure the TorchScript exporter prints the graph from C++.
    """
    import torch

    enabled = torch.backends.mha.get_fastpath_enabled()
    sys.stdout.flush()
    stdout, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with quiet(), torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)


def _shape(size: Size) -> tuple[int, int, int]:
    if isinstance(size, int):
        return 3, size, size
    return (3, *size) if len(size) == 2 else size
