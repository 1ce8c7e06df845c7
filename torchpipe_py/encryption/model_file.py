"""The file of a model, plain or encrypted; every reader of models uses this."""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchpipe_py.encryption.cipher import Cipher, CipherError
from torchpipe_py.encryption.keys import read_key
from torchpipe_py.errors import ConfigError
from torchpipe_py.files import ENCRYPTED, content_kind, file_kind

ENDING = ".enc"
"""Of the name of an encrypted model; what stands before it says what kind of model it is."""

UNSAID = "its words are left out, since the model is encrypted"


@dataclass(frozen=True)
class ModelFile:
    """A model as it lies on the disk. With a key it is an encrypted one, which is decrypted in memory only."""

    path: str
    key_file: str = ""
    key_env: str = ""

    @property
    def has_key(self) -> bool:
        return bool(self.key_file or self.key_env)

    @property
    def is_onnx(self) -> bool:
        """By its name."""
        return self.path.lower().removesuffix(ENDING).endswith(".onnx")

    def mismatch(self) -> str:
        """What is wrong where a key goes with a plain model, or none with an encrypted one; else an empty string."""
        try:
            with open(self.path, "rb") as file:
                start = file.read(len(ENCRYPTED))
        except OSError as error:
            return f"{self.path}: {error.strerror}"
        if start == ENCRYPTED and not self.has_key:
            return f"{self.path} is encrypted, and there is no key: give key_file or key_env"
        if self.has_key and not ENCRYPTED.startswith(start):  # one that is cut off has a message of its own
            key = "key_file" if self.key_file else "key_env"
            hint = f"torchpipe encrypt {self.path} makes an encrypted one; without {key} it is loaded as it is"
            return f"{self.path} is not encrypted: {hint}"
        return ""

    def cipher(self) -> Cipher | None:
        """What encrypts beside the model what is made of it; ``None`` for a plain one. Reads the key."""
        return Cipher(*read_key(self.key_file, self.key_env)) if self.has_key else None

    def source(self) -> str | io.BytesIO:
        """For libraries that open files: the path of a plain one, the content of an encrypted one."""
        if self.has_key:
            return io.BytesIO(self.read())
        self._check()
        return self.path

    def read(self) -> bytes:
        """The model's bytes, decrypted; ``ConfigError`` where that cannot be."""
        self._check()
        cipher = self.cipher()
        with open(self.path, "rb") as file:
            if cipher is None:
                return file.read()
            try:
                return cipher.decrypt_file(file)
            except CipherError as error:
                raise ConfigError(f"model {self.path}: {error}") from None

    def holds(self, word: bytes) -> bool:
        """Whether it has ``word`` in it, as an ONNX file has the names of its operators."""
        if self.has_key:
            return word in self.read()
        if not os.path.getsize(self.path):
            return False  # mmap takes no empty file
        with open(self.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(word) >= 0

    def kind_unless(self, start: bytes) -> str:
        """What a plain file is that does not begin with ``start``; an empty string where that is open."""
        with open(self.path, "rb") as file:
            return "" if file.read(len(start)) == start else self.kind()

    def kind(self) -> str:
        """What a file that a library refuses may be; an empty string where that is open."""
        if not self.has_key:
            return file_kind(self.path)
        return content_kind(io.BytesIO(self.read()), "torchpipe export makes an ONNX file of the plain one")

    def without_words(self, error: Exception) -> Exception:
        """A library's error about the model; of an encrypted one without its words, which may name layers."""
        return RuntimeError(f"{type(error).__name__}; {UNSAID}") if self.has_key else error

    def _check(self) -> None:
        problem = self.mismatch()
        if problem:
            raise ConfigError(f"model {problem}")


def outside_files(model: Any) -> list[str]:
    """The files beside an ``onnx.ModelProto`` that hold some of its tensors."""
    outside = (tensor for tensor in _tensors(model) if tensor.data_location == tensor.EXTERNAL)
    return sorted({entry.value for tensor in outside for entry in tensor.external_data if entry.key == "location"})


def _tensors(message: Any) -> Iterator[Any]:
    """Each ``onnx.TensorProto`` in it, however deep."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for part in (value,) if hasattr(value, "ListFields") else value:
            if field.message_type.name == "TensorProto":
                yield part
            yield from _tensors(part)
