"""A decoder in an expendable process of each instance's own."""

from __future__ import annotations

import logging
import pickle
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from torchpipe_py.backends.base import BackendConfig, Data, ItemBackend
from torchpipe_py.backends.image.mat import encoded_bytes
from torchpipe_py.backends.image.memory import waiting
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import ENCODED_IMAGE, Signature
from torchpipe_py.errors import BackendError, BackendUnavailable, WorkerDied, first_line
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.proc.isolation import wire
from torchpipe_py.proc.process.setup import Setup, pickle_plan
from torchpipe_py.values import to_float, to_int

if TYPE_CHECKING:  # they import what only Linux has
    from torchpipe_py.proc.isolation.decoder import Decoder
    from torchpipe_py.proc.isolation.template import Template

logger = logging.getLogger("torchpipe_py")

_STARTS = 3


class Isolated(ItemBackend):
    """Runs a decoder in a process of each instance's own, confined and expendable; ``decode_isolation`` writes it.

    Encoded bytes go in, a Mat and its ``color`` come out; the decoder sees no other key of the dict. One that crashes,
    takes longer than ``max_seconds`` or more than ``max_memory`` costs its own image: no ``result``, ``error`` is
    a ``WorkerDied`` or a ``DecodeError``, and the next image has a new process. The process opens no file and no
    connection, starts no program, and what it answers is checked and never unpickled. Linux only.
    """

    # NOTE: any_thread() stays False. The processes end with the thread that starts one, and a caller's may end at once.
    children = (1, 1)

    max_seconds = Param(to_float, 10.0, low=0.1, high=3600, doc="the most seconds that an image takes")
    max_memory = Param(
        to_int,
        1024,
        low=16,
        high=2**17,
        doc="most MiB of an encoded image, of its pixels, and of what decoding takes besides",
    )

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._colors: tuple[str | None, ...] = ()
        self._decoder: Decoder | None = None
        self._template: Template | None = None

    def prefer_color(self, color: str | None) -> str | None:
        self._colors = (color,)
        return self.config.children[0].prefer_color(color)

    def setup(self) -> None:
        if sys.platform != "linux":
            raise BackendUnavailable(f"{self.config.label}: processes for decoders need Linux")
        from torchpipe_py.proc.isolation.template import Template

        setup = self._describe()
        template = self.config.shared.get((Template, setup), lambda: Template(self.config.label, setup))
        template.enter()
        self._template = template
        decoder = self._start()
        if self.config.instance == 0 and not decoder.is_filtered:
            logger.warning("%s: this system filters no system calls; only limits confine a decoder", self.config.label)

    def signature(self) -> Signature:
        return ENCODED_IMAGE

    def is_large(self, item: Data) -> bool:
        return self.config.children[0].is_large(item)

    def forward_item(self, item: Data) -> None:
        encoded = encoded_bytes(item[TASK_DATA_KEY])
        try:
            answer = self._decode(encoded)
        except WorkerDied as error:
            logger.warning("%s", error)
            item[TASK_ERROR_KEY] = error
            self._replace()
            return
        if not isinstance(answer, wire.Refusal):
            item[TASK_RESULT_KEY], color = answer
            if color is not None:
                item[TASK_COLOR_KEY] = color
        elif answer.raised:
            raise BackendError(f"{answer.name}: {answer.message}")
        elif (problem := answer.error()) is not None:
            item[TASK_ERROR_KEY] = problem

    def close(self) -> None:
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = None
        if self._template is not None:
            self._template.leave()
            self._template = None

    def _decode(self, encoded: np.ndarray) -> tuple[np.ndarray, str | None] | wire.Refusal:
        """Of a decoder that died before it had the image, nothing is lost: the next one gets it."""
        reason: Exception | None = None
        for _ in range(_STARTS):
            try:
                decoder = self._decoder or self._restart()
            except (WorkerDied, OSError) as error:
                reason = error
                continue
            try:
                return decoder.decode(encoded)
            except WorkerDied as error:
                if decoder.has_taken:
                    raise
                reason = error
            finally:
                if not decoder.is_open:
                    self._decoder = None
        assert reason is not None
        raise WorkerDied(f"{self.config.label}: no process that decodes: {first_line(reason)}") from reason

    def _restart(self) -> Decoder:
        with waiting():
            return self._start()

    def _start(self) -> Decoder:
        from torchpipe_py.proc.isolation.decoder import Decoder

        assert self._template is not None
        config = self.config
        self._decoder = Decoder(config.label, self._template, config.instance, self.max_seconds, self.max_memory)
        return self._decoder

    def _replace(self) -> None:
        """Have a process ready for the next image."""
        try:
            self._restart()
        except Exception as error:  # the next image says so, if that still holds then
            logger.warning("%s: %s", self.config.label, first_line(error))

    def _describe(self) -> bytes:
        config = replace(self.config, params={}, children=(), filters=(), graphs=None, instance=0)
        return pickle.dumps(Setup(pickle_plan(self.config), config, self._colors, None, (), logging.WARNING))
