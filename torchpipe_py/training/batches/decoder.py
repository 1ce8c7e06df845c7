"""Images by the pipe of the TOML, one pipe for each device: what the service does with the same bytes."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.errors import InvalidRequest, NoResult, TorchpipeError
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.plan.config import GLOBAL, parse_toml
from torchpipe_py.runtime.pipe import Data, pipe
from torchpipe_py.training.batches.sample import CORRUPT, WRONG, Sample
from torchpipe_py.training.errors import TrainingError

CHUNK = 16

Config = str | os.PathLike[str] | Mapping[str, Any]


class Decoder:
    """A pipe for each of ``devices``, which decode their shares of a batch at the same time.

    ``toml_path`` is what ``pipe`` takes; on a GPU ``device_id`` of every node is set to it. Raises what ``pipe``
    raises, and ``TrainingError`` where the result for a small JPEG is no Tensor.
    """

    def __init__(self, toml_path: Config, devices: Sequence[Any]) -> None:
        self._devices = list(devices)
        self._pipes: list[pipe] = []
        try:
            for device in self._devices:
                self._pipes.append(pipe(on_device(toml_path, device)))
            self.trial = self._try_out()
        except BaseException:
            self.close()
            raise
        self.limit: int = self._pipes[0].stats()["max_inflight"]
        # Samples that are worth a start of their own; 0: none but the whole batch, since that one has shares.
        self.chunk: int = max(CHUNK, self._pipes[0].max()) if len(self._pipes) == 1 else 0
        self._lock = threading.Lock()
        self._unfinished: list[Decoding] = []

    def start(self, samples: Sequence[Sample]) -> Decoding:
        """Begin to decode, if the pipes accept that many requests beside those of batches that are not finished."""
        requests = [None if sample.image is None else {TASK_DATA_KEY: sample.image} for sample in samples]
        shares = [[request for request in share if request] for share in shares_of(requests, len(self._pipes))]
        decoding = Decoding(self, samples, requests, shares)
        with self._lock:
            fits = sum(started.size for started in self._unfinished) + decoding.size <= self.limit
            self._unfinished.append(decoding)
        if fits:
            decoding.submit()
        return decoding

    def submit(self, parts: Sequence[Sequence[Data]]) -> Iterator[Any]:
        """A future of each pipe for its part."""
        return (run.submit(part) for run, part in zip(self._pipes, parts, strict=True))

    def ended(self, decoding: Decoding) -> None:
        """The pipes have nothing of it any more."""
        with self._lock:
            self._unfinished.remove(decoding)

    def abandon(self) -> None:
        """Wait for what was started and will not be finished; nothing is started meanwhile."""
        for decoding in list(self._unfinished):
            decoding.abandon()

    def _try_out(self) -> Any:
        request = {TASK_DATA_KEY: small_jpeg()}
        self._pipes[0](request)
        sample = _with_image(outcome(Sample(0), request, None))
        if sample.image is None:
            raise TrainingError(f"the pipe gave no image for a small JPEG: {sample.reason}")
        return sample.image

    def close(self) -> None:
        """Close the pipes. Idempotent."""
        for opened in self._pipes:
            opened.close()


class Decoding:
    """A batch on its way through a decoder's pipes; to be waited for in the order in which batches were started."""

    def __init__(
        self,
        decoder: Decoder,
        samples: Sequence[Sample],
        requests: Sequence[Data | None],
        shares: Sequence[Sequence[Data]],
    ) -> None:
        self._decoder, self._samples, self._requests, self._shares = decoder, samples, requests, shares
        self.size = max(map(len, shares))  # of its largest share
        self._submitted = 0  # requests of each share
        self._futures: list[Any] = []
        self._problem: BaseException | None = None

    def submit(self) -> None:
        """As many requests as the pipes accept."""
        start, self._submitted = self._submitted, self._submitted + self._decoder.limit
        for future in self._decoder.submit([share[start : self._submitted] for share in self._shares]):
            self._futures.append(future)

    def abandon(self) -> None:
        """Wait until the pipes have nothing of it, and do not finish it."""
        for future in self._futures:
            future.exception()
        self._decoder.ended(self)

    def finish(self) -> list[Sample]:
        """The samples with Tensors for bytes, each on the device of its share; those without bytes as they were."""
        try:
            while True:
                for future in self._futures:
                    error = future.exception()
                    self._problem = self._problem or error  # more than an image that cannot be read
                self._futures = []
                if self._submitted >= self.size:
                    break
                self.submit()
        finally:
            self.abandon()  # which waits for nothing, but after an error
        problem = self._problem
        decoded = [
            sample if request is None else _with_image(outcome(sample, request, problem))
            for sample, request in zip(self._samples, self._requests, strict=True)
        ]
        if problem is not None and not any(sample.kind == WRONG for sample in decoded):
            raise problem
        return decoded


def on_device(config: Config, device: Any) -> Mapping[str, Any]:
    """The configuration with every node on ``device``; on the CPU as it is."""
    given = config if isinstance(config, Mapping) else parse_toml(config)
    # NOTE: a copy of what a file gave keeps its name, beside which paths are looked for.
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
    """``items`` in ``count`` runs, of the sizes in which ``DataParallel`` deals out a batch."""
    size = max(1, -(-len(items) // count))
    return [items[start * size : (start + 1) * size] for start in range(count)]


def small_mat(height: int = 64, width: int = 64) -> np.ndarray:
    """A Mat, gray to colourful."""
    down = np.linspace(0, 252, height, dtype=np.uint8)[:, None].repeat(width, 1)
    across = np.linspace(0, 252, width, dtype=np.uint8)[None].repeat(height, 0)
    return np.stack([across, down, np.full_like(down, 128)], axis=2)


def small_jpeg(height: int = 64, width: int = 64) -> bytes:
    """``small_mat``, encoded."""
    import cv2

    done, encoded = cv2.imencode(".jpg", small_mat(height, width))
    assert done
    return bytes(encoded)


def outcome(sample: Sample, request: Data, problem: BaseException | None) -> Sample:
    """The sample with the ``result`` of its request, or why it has none; ``problem`` is what the pipe raised."""
    if TASK_RESULT_KEY in request:
        return sample.with_image(request[TASK_RESULT_KEY])
    error = request.get(TASK_ERROR_KEY)
    if isinstance(error, InvalidRequest):
        return sample.failed(WRONG, f"the pipe cannot take the sample: {error}")
    if problem is not None and not isinstance(error, NoResult):
        # It raised: a defect in a backend, or in how the pipe is used.
        raised = error or problem
        code = raised.code if isinstance(raised, TorchpipeError) else type(raised).__name__
        return sample.failed(WRONG, f"the pipe raised ({code}) {raised}")
    return sample.failed(CORRUPT, str(error) if error is not None else "the pipe gave no result")


def _with_image(sample: Sample) -> Sample:
    """The sample, if its result is one that can be trained on."""
    if sample.kind:
        return sample
    result = sample.image
    if not isinstance(result, torch.Tensor):
        problem = f"the result of the TOML is a {type(result).__name__}, not a Tensor"
        return sample.failed(WRONG, f"{problem}; end it with Mat2Tensor, and leave the model out")
    if result.ndim not in (3, 4) or (result.ndim == 4 and result.shape[0] != 1):
        shape = shown_dims(result.shape)
        return sample.failed(WRONG, f"the result of the TOML has shape {shape}, not 1xCxHxW; leave the model out")
    return sample
