"""The common part of model backends: parameters, inputs of a request, results from a batch of outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from torchpipe_py.backends.base import Backend, BatchRange, Data
from torchpipe_py.backends.control.python import kind
from torchpipe_py.backends.image.mat import OF_MATS, name_color
from torchpipe_py.backends.image.normalize import pixel_remarks, to_divisors
from torchpipe_py.backends.model import check, postprocess
from torchpipe_py.backends.model.check import to_bounds
from torchpipe_py.backends.model.inputs import looks_like_mat
from torchpipe_py.backends.model.normalisation import (
    INTEGERS,
    Normalisation,
    NormalisationError,
    Scale,
    has_channels_last,
)
from torchpipe_py.backends.model.onnx_graph import (
    declared_tensors,
    noted_normalisation,
    scale_of_pixels,
    scaled_inputs_problem,
)
from torchpipe_py.backends.model.postprocess import OfClasses
from torchpipe_py.backends.params import Param, Remark
from torchpipe_py.backends.signature import BYTES, TENSOR, ImageSpec, Signature, TensorSpec, shown_dims
from torchpipe_py.encryption.keys import readers_problem
from torchpipe_py.encryption.model_file import ModelFile
from torchpipe_py.errors import ConfigError, InvalidRequest, counted
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.values import to_float, to_floats, to_int, to_str

Shapes = tuple[tuple[int, ...], ...]
"""The shape of each input, without the batch."""


class ModelBackend(Backend):
    """A model: ``data`` is its input, or a list in the model's order, or a dict by the names of its inputs.

    Without a ``postprocessor`` the result is the output tensor of shape 1×…, with ``max = 1`` of any shape; several
    outputs are a list. If ``data`` is a Mat and the dict has no ``color``, ``color`` becomes ``bgr``, also for an
    image as result. An input of a wrong number, shape or type has no ``result``; ``error`` is an ``InvalidRequest``.
    A subclass calls ``declare`` in ``setup`` with its model's inputs and outputs.
    """

    is_model = True

    adds_batch = False
    """It takes a model of one image, without a batch, if ``max`` is 1."""

    model = Param(to_str, file=True, doc="path of the model")
    key_file = Param(to_str, "", file=True, doc="file with the key of an encrypted model")
    key_env = Param(to_str, "", doc="environment variable with that key")
    min_batch = Param(to_bounds, to_bounds(1), key="min", doc="fewest items of a batch, or the smallest shapes")
    max_batch = Param(to_bounds, to_bounds(1), key="max", doc="most items of a batch, or the largest shapes")
    mean = Param(to_floats, (), doc="subtracted from each channel, inside the model; pixels of 0..255")
    std = Param(to_divisors, (), doc="each channel divided by it after mean, inside the model")
    means = Param(to_floats, (), key="mean::INPUT", named=True, doc="mean of the input of this name only")
    stds = Param(to_divisors, (), key="std::INPUT", named=True, doc="std of the input of this name only")
    postprocessor = postprocess.PostprocessorParam(
        to_str, "", also=("post_processor",), doc="cpu, SoftmaxMax, TopK or another; docs/models.md lists them"
    )
    labels = Param(to_str, "", file=True, doc="text file with a label a line, for postprocessors: index to label")
    k = Param(to_int, 5, low=1, doc="how many classes TopK gives")
    threshold = Param(to_float, 0.5, low=0, high=1, doc="the least score of the classes that Sigmoid gives")
    postprocessor_params: Mapping[str, Any] = {}

    @classmethod
    def remarks(cls, params: Mapping[str, Any], own: Collection[str]) -> Iterator[Remark]:
        yield from _file_remarks(ModelFile(params["model"], params["key_file"], params["key_env"]), cls.file_problem)
        least, most = params["min_batch"], params["max_batch"]
        if len(least.profiles) != len(most.profiles):
            yield Remark("min", f"min has {counted(len(least.profiles), 'profile')}, max has {len(most.profiles)}")
        elif least.exceeds(most):
            default = "" if "max" in own else ", its default"
            yield Remark("min", f"min = {least} is larger than max = {most}{default}")
        normalisation = Normalisation.of(params)
        for key, numbers in normalisation.by_key().items():
            yield from pixel_remarks(key, numbers)
        if not normalisation and (noted := noted_normalisation(params["model"])):
            text = f"{params['model']} was exported for {noted}; without them its scores are wrong, unless a node"
            yield Remark("mean", f"{text} before it normalises: then write mean = 0", is_warning=True)
        yield from _declared_remarks(params, cls.adds_batch)
        yield from _scale_remarks(params["model"], normalisation)
        for key in sorted({"labels", "k", "threshold"}.intersection(own)):
            if params[key] != getattr(cls, key).default and not postprocess.uses(params["postprocessor"], key):
                names = ", ".join(each.__name__ for each in postprocess.BUILT_IN if postprocess.uses(each, key))
                yield Remark(key, f"nothing uses it without a postprocessor that does: {names}", is_unused=True)

    @classmethod
    def image_misfits(cls, params: Mapping[str, Any], image: ImageSpec) -> Mapping[str, str]:
        return _image_misfits(params["model"], Normalisation.of(params), image)

    @classmethod
    def keys_read(cls, params: Mapping[str, Any]) -> Collection[str] | None:
        own, postprocessor = super().keys_read(params), params["postprocessor"]
        takes_items = getattr(postprocessor, "takes_items", False)
        reads: Collection[str] | None = getattr(postprocessor, "reads", None if takes_items else ())
        return None if own is None or reads is None else {*own, *reads}

    @classmethod
    def file_problem(cls, file: ModelFile) -> str:
        """The reason why a plain file cannot be loaded, by its first bytes; empty if none is known."""
        return ""

    @classmethod
    def batch_range(cls, params: Mapping[str, Any], children: Sequence[BatchRange | None]) -> BatchRange | None:
        return min(params["min_batch"].batches()), max(params["max_batch"].batches())

    inputs: Sequence[TensorSpec] = ()
    optional: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()
    output_names: Sequence[str] = ()
    scales: Mapping[int, Scale] | None = {}
    """The scale of each input that has ``mean`` or ``std``; ``None`` if the model does not declare shapes."""
    runs_pairs = True
    """It can run two items for the trial although ``max`` is 1."""
    _is_checked = False
    _allowed: Shapes = ()  # of the last request: most requests have the same

    def setup(self) -> None:
        self.file = ModelFile(self.model, self.key_file, self.key_env)
        self.normalisation = Normalisation.of(self.params)
        self._postprocess: postprocess.Postprocessor | None = None
        if self.postprocessor:
            config = {"labels": self.labels, "k": self.k, "threshold": self.threshold, "max": self.max()}
            config |= {"model": self.file, "node": self.config.node}
            own = dict(self.postprocessor_params)
            if self.labels and "labels" in own:
                own["labels"] = self.labels  # the path as resolved, perhaps beside the TOML file
            self._postprocess = postprocess.make_postprocessor(self.postprocessor, config, own)
        needs_rows = isinstance(self._postprocess, OfClasses) and self._postprocess.takes_rows
        self.layout = check.layout_of(self.max(), needs_rows)

    def declare(
        self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], optional: Sequence[TensorSpec] = ()
    ) -> None:
        """Store the declared inputs and outputs; ``ConfigError`` if the configuration does not fit them.

        ``optional`` inputs have a value in the model.
        """
        self.optional = tuple(optional)
        self.inputs, self.outputs, self.output_names = tuple(inputs), tuple(outputs), [spec.name for spec in outputs]
        check.check_inputs(self.model, inputs, self.min(), self.max())
        self.layout.check_declared(self.model, outputs, self.min(), self.max())
        for key, bounds in (("min", self.min_batch), ("max", self.max_batch)):
            bounds.check(self.model, key, inputs)
        try:
            if inputs:
                self.normalisation.check_names(inputs)
            self.scales = self.normalisation.scales(inputs) if inputs and all(spec.dims for spec in inputs) else None
        except NormalisationError as error:
            raise ConfigError(f"model {self.model}: {error.key}: {error}") from None
        _check_labels(self._postprocess, outputs)
        if isinstance(self._postprocess, postprocess.Postprocessor):  # another class may call something else `fit`
            self._postprocess.fit(outputs)

    def signature(self) -> Signature:
        gives = getattr(self._postprocess, "gives", None)
        inputs = (*self.inputs, *self.optional)
        if self._postprocess is None:
            return Signature(inputs, tuple(self.outputs))
        parameters = tuple(getattr(self._postprocess, "request_parameters", ()))
        return Signature(inputs, () if gives is None else tuple(gives(self.outputs)), parameters)

    def known_shapes(self) -> Shapes | None:
        """The smallest shape of each input, without batch, from the model, ``min`` and ``max``; ``None`` if unknown."""
        shapes = []
        for index, spec in enumerate(self.inputs):
            bounds = [bound.shape(index) for bound in (self.min_batch, self.max_batch)]
            dims = next((bound for bound in bounds if len(bound) > 1), spec.dims)
            if not dims or None in dims[1:]:
                return None
            shapes.append(tuple([dim for dim in dims[1:] if dim is not None]))
        return tuple(shapes) or None

    def check_shapes(self, shapes: Shapes) -> None:
        """Raise ``InvalidRequest`` for shapes, without batch, that ``min``, ``max`` or ``mean`` forbid."""
        if shapes == self._allowed:
            return
        for index, scale in self.scales_of(shapes).items():
            if problem := scale.misfit(shapes[index]):
                raise InvalidRequest(problem)
        if not check.allows(self.min_batch, self.max_batch, shapes):
            given = ", ".join(map(shown_dims, shapes))
            raise InvalidRequest(f"inputs of {given} are outside of min = {self.min_batch} and max = {self.max_batch}")
        self._allowed = shapes

    def scales_of(self, shapes: Shapes) -> Mapping[int, Scale]:
        """``scales``, or, where the model does not declare shapes, those of inputs of ``shapes``, without batch.

        ``InvalidRequest`` if ``mean`` and ``std`` do not fit these.
        """
        if self.scales is not None or not self.normalisation:
            return self.scales or {}
        named = self.inputs or [TensorSpec(f"input {index}") for index in range(len(shapes))]
        try:
            return self.normalisation.scales(
                [replace(spec, dims=(None, *shape)) for spec, shape in zip(named, shapes, strict=True)]
            )
        except NormalisationError as error:
            raise InvalidRequest(f"{error.key}: {str(error).partition(';')[0]}") from None

    def check_at_load(self) -> Shapes | None:
        """The ``known_shapes``. If there are any, ``check_batches``, and find inputs whose rows mix with ``max = 1``.

        Called after ``declare``.
        """
        shapes = self.known_shapes()
        if shapes is None:
            return None
        is_open = self.max() == 1 and self.runs_pairs and all(spec.dims[:1] == (None,) for spec in self.inputs)
        trial = self.check_batches(shapes, self.max(), tries_pair=is_open)
        if is_open and trial is not None and trial.rows_mix:
            self.inputs = tuple([replace(spec, rows_mix=True) for spec in self.inputs])
        return shapes

    def check_batches(self, shapes: Shapes, count: int = 2, tries_pair: bool = False) -> check.BatchCheck | None:
        """Raise ``ConfigError`` if the model mixes items of a batch of ``count``; called before the first batch.

        A batch of two is enough, and delays the first request by only five times its own work. ``tries_pair``: see
        ``BatchCheck``, which is returned if it had to be asked.
        """
        if self._is_checked:
            return None
        key = ("batch check", self.model, self.max())
        trial: check.BatchCheck = self.config.shared.get(
            key, lambda: check.BatchCheck(self.model, self.layout, self.tolerance(), bool(self.normalisation))
        )
        named = self.inputs or [TensorSpec(f"input {index}") for index in range(len(shapes))]
        inputs = [replace(spec, dims=(None, *shape)) for spec, shape in zip(named, shapes, strict=True)]
        sizes = self.trial_sizes(count, shapes)
        self._is_checked = trial.require(self.run_on_host, inputs, self.output_names, *sizes, tries_pair=tries_pair)
        return trial

    def trial_sizes(self, count: int, shapes: Shapes) -> BatchRange:
        """The smallest batch of these shapes, and one of ``count`` items, or as near to that as there is."""
        return self.min(), max(self.min(), min(count, self.max()))

    def tolerance(self) -> float:
        """The most that rounding changes with the batch, as a part of an output's largest value."""
        return check.EXACT

    def run_on_host(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """Outputs for inputs N×…, in the model's order."""
        raise NotImplementedError(type(self).__name__)

    def max(self) -> int:
        return int(max(self.max_batch.batches()))

    def min(self) -> int:
        return int(min(self.min_batch.batches()))

    def forward(self, items: list[Data]) -> None:
        groups: dict[Shapes, tuple[list[Data], list[list[Any]]]] = {}
        for item in items:
            try:
                shapes, row = self.read(item)
                self.check_shapes(shapes)
            except InvalidRequest as error:
                item[TASK_ERROR_KEY] = error
                continue
            members, rows = groups.setdefault(shapes, ([], []))
            members.append(item)
            rows.append(row)
        for shapes, (members, rows) in groups.items():
            try:
                self.check_batches(shapes)
                self.run_group(shapes, members, rows)
            except InvalidRequest as error:
                if len(members) > self.min():
                    raise  # alone, each item may have a size that the model takes
                for item in members:
                    item[TASK_ERROR_KEY] = error

    def read(self, item: Data) -> tuple[Shapes, list[Any]]:
        """The inputs of one request, and the shape of each, without batch; ``InvalidRequest`` if they do not fit."""
        raise NotImplementedError(type(self).__name__)

    def run_group(self, shapes: Shapes, items: list[Data], rows: list[list[Any]]) -> None:
        """Run requests whose inputs have the same ``shapes``; ``rows`` holds the inputs of each."""
        raise NotImplementedError(type(self).__name__)

    def write_results(self, items: Sequence[Data], outputs: list[Any]) -> None:
        """Distribute a batch's outputs to its items by ``layout``."""
        if self._postprocess is not None:
            self.spread(items, self._postprocess.forward(outputs, *self._items_for_postprocessor(items)))
            return
        for item, result in zip(items, self.layout.of_items(outputs), strict=True):
            data = item[TASK_DATA_KEY]
            if isinstance(data, np.ndarray) and data.ndim == 3 and looks_like_mat(data):
                name_color(item, data.shape[2], OF_MATS)
            item[TASK_RESULT_KEY] = result

    def write_finished(self, items: Sequence[Data], tensors: list[Any]) -> None:
        """Give a batch's items the results of what the GPU's part of the postprocessor made."""
        postprocess: Any = self._postprocess
        self.spread(items, postprocess.on_host(tensors, *self._items_for_postprocessor(items)))

    def _items_for_postprocessor(self, items: Sequence[Data]) -> tuple[Sequence[Data], ...]:
        return (items,) if getattr(self._postprocess, "takes_items", False) else ()

    def spread(self, items: Sequence[Data], results: Sequence[Any]) -> None:
        """Give each item its result; ``ValueError`` if a postprocessor did not return a list of one for each."""
        if isinstance(results, (dict, str, bytes)) or not hasattr(results, "__len__"):
            problem = f"{self.postprocessor.__name__} returned {kind(results)}"
            raise ValueError(f"{problem}; expected a list of one result for each item")
        if len(results) != len(items):
            counts = f"{counted(len(results), 'result')} for {counted(len(items), 'item')}"
            raise ValueError(f"{self.postprocessor.__name__} returned {counts}")
        for item, result in zip(items, results, strict=True):
            if isinstance(result, postprocess.Written):
                item.update(result)
            elif isinstance(result, BaseException):
                item[TASK_ERROR_KEY] = result
            else:
                item[TASK_RESULT_KEY] = result


def _file_remarks(file: ModelFile, problem_of: Callable[[ModelFile], str]) -> Iterator[Remark]:
    if file.key_file and file.key_env:
        yield Remark("key_env", "key_file is set, too; a model has one key")
        return
    if problem := file.mismatch():
        yield Remark("key_file" if file.key_file else "key_env" if file.key_env else "model", problem)
    elif not file.has_key and (problem := problem_of(file)):
        yield Remark("model", problem)
    if file.key_file and (problem := readers_problem(file.key_file)):
        yield Remark("key_file", problem, is_warning=True)


def _check_labels(postprocessor: Any, outputs: Sequence[TensorSpec]) -> None:
    """Raise ``ConfigError`` if labels or postprocessor do not fit the first output, as far as it is declared."""
    dims = outputs[0].dims if outputs else ()
    needs_numbers = isinstance(postprocessor, OfClasses) and not isinstance(postprocessor, postprocess.Cpu)
    if needs_numbers and outputs and outputs[0].dtype == BYTES:
        name = type(postprocessor).__name__
        raise ConfigError(f"{name} takes numbers, and output {outputs[0].name!r} has texts; cpu gives them")
    # A custom postprocessor may make rows N×C of an output of another shape.
    is_known = len(dims) == 2 or (dims and type(postprocessor) in postprocess.BUILT_IN)
    if is_known and isinstance(postprocessor, OfClasses):
        postprocessor.check(dims)


def layout_of(params: Mapping[str, Any]) -> check.Layout:
    """How items get their parts of the outputs, as ``setup`` finds it."""
    cls = params["postprocessor"]
    needs_rows = isinstance(cls, type) and issubclass(cls, OfClasses) and cls.takes_rows
    return check.layout_of(max(params["max_batch"].batches()), needs_rows)


def _declared_remarks(params: Mapping[str, Any], adds_batch: bool) -> Iterator[Remark]:
    """Problems of an ONNX file that ``declare`` will refuse."""
    model, (inputs, outputs) = params["model"], declared_tensors(params["model"])
    least, most = (pick(params[key].batches()) for pick, key in ((min, "min_batch"), (max, "max_batch")))
    cls = params["postprocessor"]
    if least <= most:
        layout = layout_of(params)
        given = inputs
        if adds_batch:
            shapes = check.with_batch([spec.dims for spec in inputs], most, layout.is_whole)
            given = [replace(spec, dims=dims) for spec, dims in zip(inputs, shapes, strict=True)]
        try:
            check.check_inputs(model, given, least, most)
            layout.check_declared(model, outputs, least, most)
        except ConfigError as error:
            yield Remark("model", str(error))
        for key, name in (("min", "min_batch"), ("max", "max_batch")):
            try:
                params[name].check(model, key, given)
            except ConfigError as error:
                yield Remark(key, str(error))
    file = ModelFile(model, params["key_file"], params["key_env"])
    if cls in postprocess.BUILT_IN and not file.has_key:
        try:
            config = {key: params[key] for key in ("labels", "k", "threshold")}
            own = params.get("postprocessor_params", {})
            postprocessor = postprocess.make_postprocessor(cls, {**config, "max": most, "model": file}, own)
            _check_labels(postprocessor, outputs)
            postprocessor.fit(outputs)
        except ConfigError as error:
            key = "labels" if params["labels"] and "label" in str(error) else "postprocessor"
            yield Remark(key, str(error).removeprefix("labels: "))
        if len(outputs) > 1 and issubclass(cls, OfClasses) and cls is not postprocess.Cpu:
            unused = ", ".join(repr(output.name) for output in outputs[1:])
            text = f"{cls.__name__} reads the first output, {outputs[0].name!r}; nothing uses {unused} (cpu gives all)"
            yield Remark("postprocessor", text, is_warning=True)


def _scale_remarks(model: str, normalisation: Normalisation) -> Iterator[Remark]:
    """Problems of ``mean`` and ``std`` that will be refused when an ONNX file is loaded."""
    inputs, _ = declared_tensors(model)
    if not (inputs and normalisation):
        return
    try:
        scales = normalisation.scales(inputs)
    except NormalisationError as error:
        yield Remark(error.key, f"model {model}: {error}")
        return
    key = next(iter(normalisation.by_key()))
    if problem := scaled_inputs_problem(model, scales, inputs):
        yield Remark(key, f"model {model}: {problem}")
        return
    names = [repr(inputs[index].name) for index in scales]
    if len(names) > 1 and key in ("mean", "std"):
        yield Remark(key, f"model {model}: applied to inputs {' and '.join(names)} alike", is_warning=True)
    twice = {index for index, scale in scales.items() if _is_scaled_twice(model, inputs[index].name, scale)}
    for index in sorted(twice):
        begins = f"the model begins by normalising pixels 0..255 of input {inputs[index].name!r} itself"
        text = f"{begins}, and mean and std here come before that: the pixels are scaled twice; leave mean and std out"
        yield Remark(key, f"model {model}: {text}", is_warning=True)
    for spec in [inputs[index] for index in scales if inputs[index].dtype in INTEGERS and index not in twice]:
        text = f"input {spec.name!r} takes {spec.dtype}: normalised inside the model, after a cast to float32"
        yield Remark(key, f"model {model}: {text}", is_warning=True)


def _is_scaled_twice(model: str, name: str, scale: Scale) -> bool:
    """Whether pixels are divided by ``std``, and an ONNX file begins as one that takes 0..255."""
    return max(scale.std, default=1) > 2 and scale_of_pixels(model, name) == 255


def _image_misfits(model: str, normalisation: Normalisation, image: ImageSpec) -> dict[str, str]:
    """Properties of an image that do not fit an ONNX file: its ``kind``, or a size if the file has one input."""
    inputs, _ = declared_tensors(model)
    if image.is_normalised and any(any(mean) or any(x != 1 for x in std) for mean, std in normalisation.pairs()):
        return {"kind": 'normalised already: write its keys as "NormalizeMat::mean", or leave it out'}
    if len(inputs) > 1:
        listed = ", ".join(map(str, inputs))
        return {"kind": f"and {model} has {counted(len(inputs), 'input')}: data must be a list or a dict of {listed}"}
    if not inputs:
        return {}
    dims, dtype = inputs[0].dims, inputs[0].dtype
    takes = f"but {model} takes {shown_dims((1, *dims[1:]))}"
    if dtype in (BYTES, "bool"):
        texts = "texts" if dtype == BYTES else "values of bool"
        return {"kind": f"{takes} of {texts}, not an image: leave out what decodes it, or use another model"}
    if image.is_normalised and dtype in INTEGERS:
        return {"kind": f"of float32, {takes} of {dtype}: leave out NormalizeMat or NormalizeTensor"}
    if 0 < len(dims) < 3:
        return {"kind": f"{takes}, which is not an image"}
    if len(dims) != 4:
        return {}
    if image.kind == TENSOR and has_channels_last(dims):
        give = "give it a Mat, which is laid out as the model takes it: leave out Mat2Tensor, or put Tensor2Mat before"
        return {"kind": f"1xCxHxW, {takes}; {give}"}
    # Possible orders of the dimensions after the batch, likely ones first; a Mat is laid out as the model declares.
    orders = [("channels", "height", "width"), ("height", "width", "channels")]
    orders = orders[:1] if image.kind == TENSOR else orders[::-1] if has_channels_last(dims) else orders
    first_misfits: dict[str, str] = {}
    for order in orders:
        fixed = dict(zip(order, dims[1:], strict=True))
        wrong = [name for name in sorted(order) if fixed[name] and getattr(image, name) not in (None, fixed[name])]
        if not wrong:
            return {}
        first_misfits = first_misfits or {name: f"{takes}: {_wanted(name, fixed[name])}" for name in wrong}
    return first_misfits


def _wanted(name: str, number: int | None) -> str:
    return counted(number or 0, "channel") if name == "channels" else f"a {name} of {number}"
