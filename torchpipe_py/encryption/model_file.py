"""A model's file, plain or encrypted; used by all code that reads models."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchpipe_py.encryption.cipher import Cipher, CipherError
from torchpipe_py.encryption.keys import read_key
from torchpipe_py.errors import ConfigError
from torchpipe_py.files import ENCRYPTED, content_kind, file_kind

ENDING = ".enc"
"""Suffix of an encrypted model's name; the suffix before it gives the kind of model."""

REDACTED = "its message is withheld, since the model is encrypted"


@dataclass(frozen=True)
class ModelFile:
    """A model on disk. With a key it is an encrypted model, which is decrypted only in memory."""

    path: str
    key_file: str = ""
    key_env: str = ""

    @property
    def has_key(self) -> bool:
        return bool(self.key_file or self.key_env)

    @property
    def is_onnx(self) -> bool:
        """Whether its name is that of an ONNX file."""
        return self.path.lower().removesuffix(ENDING).endswith(".onnx")

    def mismatch(self) -> str:
        """The problem of the name, or of a key that is missing or not needed; else an empty string."""
        try:
            self.path.encode()
        except UnicodeEncodeError:
            return f"{self.path} has a name that is not UTF-8, which neither TOML nor ONNX Runtime takes: rename it"
        try:
            with open(self.path, "rb") as file:
                start = file.read(len(ENCRYPTED))
        except OSError as error:
            return f"{self.path}: {error.strerror}"
        if start == ENCRYPTED and not self.has_key:
            return f"{self.path} is encrypted, and there is no key: give key_file or key_env"
        if self.has_key and not ENCRYPTED.startswith(start):  # a truncated file gets another message
            key = "key_file" if self.key_file else "key_env"
            hint = f"torchpipe encrypt {self.path} makes an encrypted one; without {key} it is loaded as it is"
            return f"{self.path} is not encrypted: {hint}"
        return ""

    def cipher(self) -> Cipher | None:
        """The cipher for files derived from an encrypted model; ``None`` for a plain model. Reads the key."""
        return Cipher(*read_key(self.key_file, self.key_env)) if self.has_key else None

    def source(self) -> str | io.BytesIO:
        """The path of a plain model, or the content of an encrypted one, for libraries that open files."""
        if self.has_key:
            return io.BytesIO(self.read())
        self._check()
        return self.path

    def read(self) -> bytes:
        """The model's bytes, decrypted; ``ConfigError`` if that fails."""
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
        """Whether it contains ``word``, for example an operator's name in an ONNX file."""
        if self.has_key:
            return word in self.read()
        before = b""
        with open(self.path, "rb") as file:
            while part := file.read(2**20):
                if word in before + part:
                    return True
                before = part[-len(word) :]
        return False

    def kind_unless(self, start: bytes) -> str:
        """The probable kind of a plain file that does not begin with ``start``; an empty string if unknown."""
        with open(self.path, "rb") as file:
            return "" if file.read(len(start)) == start else self.kind()

    def kind(self) -> str:
        """The probable kind of a file that a library refused; an empty string if unknown."""
        if not self.has_key:
            return file_kind(self.path)
        return content_kind(io.BytesIO(self.read()), "torchpipe export makes an ONNX file of the plain one")

    def without_words(self, error: Exception) -> Exception:
        """A library's error about the model; without its text for an encrypted model, as it may name layers."""
        return RuntimeError(f"{type(error).__name__}; {REDACTED}") if self.has_key else error

    def _check(self) -> None:
        problem = self.mismatch()
        if problem:
            raise ConfigError(f"model {problem}")


def outside_files(model: Any) -> list[str]:
    """The external files that hold tensors of an ``onnx.ModelProto``."""
    outside = (tensor for tensor in _tensors(model) if tensor.data_location == tensor.EXTERNAL)
    return sorted({entry.value for tensor in outside for entry in tensor.external_data if entry.key == "location"})


def _tensors(message: Any) -> Iterator[Any]:
    """Each ``onnx.TensorProto`` in a message, at any depth."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for part in (value,) if hasattr(value, "ListFields") else value:
            if field.message_type.name == "TensorProto":
                yield part
            yield from _tensors(part)
