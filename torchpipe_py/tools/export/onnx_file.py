"""Writes a PyTorch module of images as one ONNX file with a dynamic batch, and compares the two."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from torchpipe_py.backends.model.onnx_graph import keep_telemetry_off
from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.errors import describe
from torchpipe_py.tools.compare_models.figures import largest_difference
from torchpipe_py.tools.export.branches import Place, listed_places
from torchpipe_py.tools.export.outputs import shown, tensors_of
from torchpipe_py.tools.report import ToolError

PROTOBUF_LIMIT = 2**31  # bytes; a single ONNX file cannot be larger
DYNAMO_MIN_OPSET = 18  # the oldest that torch's newer exporter writes
OPSET = 17
TOLERANCE = 1e-3  # of the largest output
BATCHES = (1, 3, 7)
PLAIN = ("black", "white", "gray", "checkerboard")
"""Pictures that are compared alone, after the random batches."""

Axes = dict[str, dict[int, str]]  # tensor → dynamic dimension → its name
Size = int | tuple[int, int] | tuple[int, int, int]
"""Pixels: the side of a square, or height and width; or channels (if not three), height and width."""

BATCH_AXES: Axes = {"input": {0: "batch"}, "logits": {0: "batch"}}


def one_line(error: BaseException) -> str:
    """Type and message of an exception on one line, at most 200 characters."""
    return " ".join(describe(error, 200).split())


def save_onnx(model: Any, path: Path, size: Size, opset: int = OPSET, axes: Axes = BATCH_AXES) -> list[Place]:
    """Write ``model``, which is set to eval mode, with its weights to ``path``.

    The input is ``input``, float32 N×C×H×W; ``axes`` lists it and the outputs, in order, with their dynamic
    dimensions. Returns the lines whose Python values the exporter may have fixed: sizes, or values of its example.
    Raises ``ToolError`` if no exporter of this PyTorch can do it.
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
            with _exporting() as raised:
                torch.onnx.export(model, (example.clone(),), str(path), **names, **settings)
            return [Place(each.filename, each.lineno) for each in raised if each.category is torch.jit.TracerWarning]
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
    """Normalised images: Gaussian noise in batches of these sizes, then each of ``PLAIN``, alone."""
    import torch

    generator = torch.Generator().manual_seed(0)
    channels, height, width = _shape(size)
    images = [torch.randn(batch, channels, height, width, generator=generator) for batch in batches]
    checked = 5.0 * ((torch.arange(height)[:, None] + torch.arange(width)) % 2).float() - 2.5
    plain = [torch.full((channels, height, width), level) for level in (-2.5, 2.5, 0.0)]
    return [*images, *[each.expand(1, channels, height, width).clone() for each in (*plain, checked)]]


def outputs_of(model: Callable[[Any], Any], images: Any) -> dict[str, Any]:
    """A module's outputs for a batch, by their places; ``ToolError`` unless they are Tensors, or hold Tensors."""
    import torch

    with torch.inference_mode():
        value = model(images.clone())  # it may write into its input
    is_listed = isinstance(value, list) and len(value) == len(images) and all(isinstance(each, dict) for each in value)
    if is_listed:
        hint = "write the ONNX file with torch.onnx.export, and serve it with max = 1 (docs/detectors.md)"
        raise ToolError(f"forward returns a dict for each image, as torchvision's detectors do: {hint}")
    outputs = {shown(path): tensor for path, tensor in tensors_of(value)}
    if not outputs:
        raise ToolError(f"forward returns no Tensor, but a {type(value).__name__}")
    return outputs


@dataclass(frozen=True)
class Deviation:
    """How an ONNX file answers beside PyTorch: the largest absolute difference, and the largest output.

    ``places`` are lines whose Python values the exporter may have fixed.
    """

    difference: float
    largest: float
    places: Sequence[Place] = ()


def compare_outputs(
    model: Callable[[Any], Any], session: Any, inputs: dict[str, Any], tolerance: float, causes: str = ""
) -> Deviation:
    """Compare PyTorch's and ONNX Runtime's outputs for batches, each named for messages, random ones first.

    ``ToolError`` for outputs of other shapes, for NaN and infinity, and for a difference of more than ``tolerance``
    times the largest magnitude that the output has for this batch or those before it; ``causes`` is its explanation.
    """
    worst, scales = 0.0, dict[str, float]()
    for name, images in inputs.items():
        served = session.run(None, {"input": images.numpy()})
        for (place, expected), actual in zip(outputs_of(model, images).items(), served, strict=True):
            where = f"output {place} for {name}"
            if tuple(expected.shape) != actual.shape:
                shapes = f"{shown_dims(expected.shape)} in PyTorch, {shown_dims(actual.shape)} in ONNX"
                raise ToolError(f"{where} is {shapes}; {_FIXED}")
            values = expected.double().numpy()
            for side, numbers in (("PyTorch", values), ("the ONNX file", actual)):
                if not np.isfinite(numbers).all():
                    raise ToolError(f"{where} of {side} holds NaN or infinity")
            difference, largest = largest_difference(values, actual)
            scales[place] = max(scales.get(place, 0.0), largest)
            if difference > tolerance * scales[place]:
                apart = f"{difference:.2g}, of {scales[place]:.2g} at most"
                raise ToolError(f"{where} differs from PyTorch's by {apart}{causes}")
            worst = max(worst, difference)
    return Deviation(worst, max(scales.values(), default=0.0))


_FIXED = "forward may contain a fixed batch size: use x.flatten(1), not x.view(4, -1)"


def export_checked(
    model: Any,
    path: Path,
    *,
    size: Size,
    opset: int = OPSET,
    batches: Sequence[int] = BATCHES,
    tolerance: float = TOLERANCE,
    axes: Axes = BATCH_AXES,
) -> Deviation:
    """``save_onnx``, then ``compare_outputs`` for random images at every batch size, and for plain ones.

    Raises ``ToolError`` if they differ, or the file does not run at some batch size.
    """
    places = save_onnx(model, path, size, opset, axes)
    causes = ": an operator may compute otherwise in ONNX"
    if places:
        causes += f", or forward may have read values that the exporter fixed, at {listed_places(places)}"
    names = [f"a batch of {batch} random pictures" for batch in batches] + [f"a {name} picture" for name in PLAIN]
    inputs = dict(zip(names, noise(size, batches), strict=True))
    try:
        found = compare_outputs(model.eval(), open_session(path), inputs, tolerance, causes)
    except ToolError as error:
        raise ToolError(f"{path.name}: {error}") from None
    except Exception as error:
        why = f"does not run at batches of {', '.join(map(str, batches))}: {one_line(error)}"
        raise ToolError(f"{path.name} {why}; {_FIXED}") from error
    return replace(found, places=places)


def check_batch(model: Any, size: Size) -> dict[str, Any]:
    """The outputs for a batch of three, by their places; ``ToolError`` if they differ from those of single images."""
    (images,) = noise(size, (3,))[:1]
    try:
        outputs, again = outputs_of(model.eval(), images), outputs_of(model, images)
        single = [outputs_of(model, images[index : index + 1]) for index in range(3)]
    except ToolError:
        raise
    except Exception as error:
        raise ToolError(_not_taken(model, shown_dims(images.shape[1:]), error)) from error
    for place, output in outputs.items():
        if not output.ndim or len(output) != 3:
            raise ToolError(f"output {place} is {shown_dims(output.shape)} for a batch of 3; it must begin with 3")
        if not bool(output.isfinite().all()):
            raise ToolError(f"output {place} holds NaN or infinity for random images: are the weights complete?")
        if not _is_near(output, again[place]):
            why = "dropout that does not look at self.training, or random numbers"
            raise ToolError(f"output {place} is another each time for the same images: {why}")
        for row, alone in zip(output, single, strict=True):
            if place not in alone or alone[place].shape != row[None].shape:
                shapes = f"{shown_dims(alone[place].shape)} for one image" if place in alone else "missing for one"
                hint = "squeeze() drops a batch of one: use squeeze(dim) or flatten(1)"
                raise ToolError(f"output {place} is {shown_dims(output.shape)} for three images, and {shapes}; {hint}")
            difference, scale = largest_difference(row[None].double().numpy(), alone[place].double().numpy())
            if not difference <= TOLERANCE * scale:
                apart = f"{difference:.2g} apart, of {scale:.2g}"
                causes = (
                    "BatchNorm without running statistics, a reduction over dimension 0, or a view that mixes images"
                )
                raise ToolError(f"output {place} of an image depends on the others of its batch: {apart}; {causes}")
    return outputs


def _is_near(one: Any, other: Any) -> bool:
    if one.shape != other.shape:
        return False
    difference, scale = largest_difference(one.double().numpy(), other.double().numpy())
    return difference <= TOLERANCE * scale


def _not_taken(model: Any, size: str, error: Exception) -> str:
    """Why a model fails for a batch of images of ``size``."""
    why = one_line(error)
    needed = required_parameters(model.forward)
    if len(needed) > 1:
        return f"forward takes {len(needed)} inputs ({', '.join(needed)}), and images are one: {why}"
    if "torchvision::" in why:
        hint = "install the torchvision that belongs to this PyTorch"
        return f"the model needs torchvision's compiled operators, which cannot be loaded here: {why}; {hint}"
    hint = "either it takes another size (--resize HxW; --color gray for one channel), or forward fails for any image"
    return f"the model does not take images of {size}: {why}; {hint}"


def required_parameters(function: Any) -> list[str]:
    """The parameters without a default that a function takes by place."""
    if not callable(function):
        return []
    with suppress(TypeError, ValueError):  # a function written in C may not have a signature
        parameters = inspect.signature(function).parameters.values()
        by_place = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        return [each.name for each in by_place if each.default is each.empty]
    return []


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
def _exporting() -> Iterator[list[warnings.WarningMessage]]:
    """The context for PyTorch's exporters: no gradients, no output, no fused attention; it collects their warnings.

    Fused multi-head attention has no ONNX counterpart. On failure the TorchScript exporter prints the graph from C++.
    """
    import torch

    enabled = torch.backends.mha.get_fastpath_enabled()
    sys.stdout.flush()
    stdout, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with quiet(), torch.no_grad(), warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            yield raised
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)


def _shape(size: Size) -> tuple[int, int, int]:
    if isinstance(size, int):
        return 3, size, size
    return (3, *size) if len(size) == 2 else size
