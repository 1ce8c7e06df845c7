"""Decodes images with the pipe of the TOML, one pipe per device: exactly as the service does."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchpipe_py.backends.image.decoders import Decoders
from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.errors import InvalidRequest, NoResult, TorchpipeError
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.plan.build import Pipeline, plan_pipeline
from torchpipe_py.plan.config import GLOBAL, parse_toml
from torchpipe_py.plan.sharing import MOST_INFLIGHT
from torchpipe_py.runtime.pipe import Data, pipe
from torchpipe_py.training.errors import TrainingError
from torchpipe_py.training.samples import CORRUPT, WRONG, Sample

CHUNK = 16
TRIAL = "a small image"
"""The name in messages of the image that pipes and transforms are tried on."""

Config = str | os.PathLike[str] | Mapping[str, Any]


def unlimited(pipeline: Pipeline) -> Pipeline:
    """The plan without its ``max_inflight``, for a caller that limits what is under way itself."""
    return replace(pipeline, spec=replace(pipeline.spec, max_inflight=MOST_INFLIGHT))


def plans_of(toml_path: Config, devices: Sequence[Any], processes: int = 1) -> list[Pipeline]:
    """A plan for each device; ``processes`` share the cores.

    ``toml_path`` is any configuration that ``pipe`` takes; on a GPU, ``device_id`` of every node is set to that GPU.
    Raises the ``ConfigError`` of ``pipe``.
    """
    return [unlimited(plan_pipeline(on_device(toml_path, device), processes=processes)) for device in devices]


class Decoder:
    """A pipe for each of ``plans``; the pipes decode their shares of a batch at the same time.

    Raises the errors of ``pipe``, and ``TrainingError`` if the result for a small image is not a Tensor.
    """

    def __init__(self, plans: Sequence[Pipeline]) -> None:
        self._pipes: list[pipe] = []
        try:
            for plan in plans:
                self._pipes.append(pipe(plan))
            self._pipes[0](request := {TASK_DATA_KEY: Decoders.of(plans[0]).small_image()})
            trial = _with_image(Sample(0), request, None)
            if trial.kind:
                raise TrainingError(f"the pipe gave no image for {TRIAL}: {trial.reason}")
        except BaseException:
            self.close()
            raise
        self.trial: Any = trial.image
        # Samples that are worth a separate start; 0: only the whole batch, which is split among the devices.
        self.chunk: int = max(CHUNK, self._pipes[0].max()) if len(self._pipes) == 1 else 0

    def start(self, samples: Sequence[Sample]) -> Callable[[], list[Sample]]:
        """Start decoding; returns a function for the outcome.

        That function waits, and returns the samples with Tensors in place of bytes, each on the device of its share;
        samples without bytes are unchanged.
        """
        requests = [None if sample.image is None else {TASK_DATA_KEY: sample.image} for sample in samples]
        futures = []
        for run, share in zip(self._pipes, shares_of(requests, len(self._pipes)), strict=True):
            futures.append(run.submit([request for request in share if request is not None]))

        def finish() -> list[Sample]:
            errors = [future.exception() for future in futures]
            problem = next((error for error in errors if error is not None), None)
            for sample, request in zip(samples, requests, strict=True):
                if request is not None:
                    _with_image(sample, request, problem)
            if problem is not None and not any(sample.kind == WRONG for sample in samples):
                raise problem
            return list(samples)

        return finish

    def close(self) -> None:
        """Close the pipes. Idempotent."""
        for opened in self._pipes:
            opened.close()


def on_device(config: Config, device: Any) -> Mapping[str, Any]:
    """The configuration with every node on ``device``; unchanged for the CPU."""
    given = config if isinstance(config, Mapping) else parse_toml(config)
    # NOTE: a copy of a file's tables keeps its name, so that paths beside the file are found.
    tables: dict[str, Any] = copy.deepcopy(given if isinstance(given, dict) else dict(given))
    if device.type != "cuda":
        return tables
    if not any(isinstance(table, Mapping) for table in tables.values()):
        return {**tables, "device_id": device.index}
    for name, table in tables.items():
        if name != GLOBAL and "." not in name and isinstance(table, dict):
            table["device_id"] = device.index
    return tables


def shares_of(items: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """Split ``items`` into ``count`` consecutive parts, of the sizes that ``DataParallel`` uses."""
    size = max(1, -(-len(items) // count))
    return [items[start * size : (start + 1) * size] for start in range(count)]


def outcome(sample: Sample, request: Data, problem: BaseException | None) -> Sample:
    """Set the sample's image to the ``result`` of its request, or its reason; ``problem`` is the pipe's exception."""
    if TASK_RESULT_KEY in request:
        sample.image = request[TASK_RESULT_KEY]
        return sample
    error = request.get(TASK_ERROR_KEY)
    if isinstance(error, InvalidRequest):
        return sample.fail(WRONG, f"the pipe cannot take the sample: {error}")
    if problem is not None and not isinstance(error, NoResult):
        # An exception means a defect in a backend, or wrong use of the pipe.
        raised = error or problem
        code = raised.code if isinstance(raised, TorchpipeError) else type(raised).__name__
        return sample.fail(WRONG, f"the pipe raised ({code}) {raised}")
    return sample.fail(CORRUPT, str(error) if error is not None else "the pipe gave no result")


def _with_image(sample: Sample, request: Data, problem: BaseException | None) -> Sample:
    """``outcome``, which must be a Tensor for training."""
    image = outcome(sample, request, problem).image
    if sample.kind:
        return sample
    if not isinstance(image, torch.Tensor):
        wrong = f"is a {type(image).__name__}, not a Tensor; end it with Mat2Tensor, and"
    elif image.ndim != 3 and (image.ndim != 4 or len(image) != 1):
        wrong = f"has shape {shown_dims(image.shape)}, not 1xCxHxW;"
    else:
        return sample
    return sample.fail(WRONG, f"the result of the TOML {wrong} leave the model out")
