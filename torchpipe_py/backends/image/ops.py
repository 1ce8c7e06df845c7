"""Backends that resize, cut and pad: each ``Operation`` is a placement of pixels, computed on Mats and on Tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from torchpipe_py.backends.base import Data, Isolation, ItemBackend
from torchpipe_py.backends.image import geometry, original, resampling
from torchpipe_py.backends.image import mat as mats
from torchpipe_py.backends.image.geometry import Placement, Size
from torchpipe_py.backends.image.tensor import data_format, on_tensors, place_tensor, tensor_of
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import MAT, TENSOR
from torchpipe_py.errors import InvalidRequest
from torchpipe_py.keys import TASK_BOX_KEY, TASK_COLOR_KEY, TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.values import to_bool, to_int, to_str

MOST_VALUES = 2**25  # in one resize call on a GPU, which holds them twice, as they are and in float32

FLOAT_BYTES = 4


class Operation(NamedTuple):
    """A geometric operation: ``place(backend, item, height, width)`` computes a ``Placement`` from parameters and dict.

    ``params`` belong to both backends, for Mats and Tensors, as a pair if they differ; ``sides`` name the height and
    the width of the result, ``reads`` the keys of the dict.
    """

    place: Callable[[Any, Data, int, int], Placement]
    params: Mapping[str, Param | tuple[Param, Param]]
    sides: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    def declare(self, cls: type[ItemBackend], kind: int) -> None:
        """Give ``cls`` the parameters; ``kind`` is 0 for Mats and 1 for Tensors."""
        cls.sides, cls.reads = self.sides, (*self.reads, TASK_COLOR_KEY, *original.KEYS)
        for key, param in self.params.items():
            value = param[kind] if isinstance(param, tuple) else param
            setattr(cls, key, value)
            value.__set_name__(cls, key)

    def placement(self, backend: Any, item: Data, shape: tuple[int, int, int], value_bytes: int) -> Placement:
        """The placement of an image of ``shape`` (height, width, channels); ``InvalidRequest`` if it is too large."""
        height, width, channels = shape
        placement = self.place(backend, item, height, width)
        if placement.crop is None or placement.canvas is not None:  # a crop is never larger than its image
            geometry.check_size(
                placement.canvas or placement.size, channels, value_bytes, getattr(backend, "max_pixels", None)
            )
        original.follow(item, height, width, placement)
        if placement.inverse_trans is not None:
            item["inverse_trans"] = placement.inverse_trans
        return placement


B = TypeVar("B", bound=type[ItemBackend])


def on_mats(
    operation: Operation,
    resize: Callable[[str], mats.Resize] | None = None,
    dtypes: tuple[Any, ...] = (mats.UINT8, mats.FLOAT32),
    follows: bool = False,
) -> Callable[[B], B]:
    """Make a backend on Mats of ``dtypes``; ``resize`` makes the function of an ``interpolation``.

    ``follows``: it uses no key of the dict but ``data`` and ``result``, and so runs in the process of an isolated
    decoder.
    """

    def setup(self: Any) -> None:
        self._resize = resize and resize(getattr(self, "interpolation", "bilinear"))

    def forward_item(self: Any, item: Data) -> None:
        mat = mats.as_mat(item[TASK_DATA_KEY], dtypes)
        shape, part = mat.shape, None
        if self.takes_reduced:
            (height, width), reduction = original.whole(item, *shape[:2])
            part = height / reduction, width / reduction
            shape, part = (height, width, shape[2]), None if part == shape[:2] else part
        placement = operation.placement(self, item, shape, mat.itemsize)
        if getattr(self, "keep_original", False):
            original.keep(item, mat, mats.color_of(item, mat.shape[2], mats.OF_MATS))
        item[TASK_RESULT_KEY] = mats.place_mat(mat, placement, self._resize, getattr(self, "pad_value", 0), part)

    def sizes(cls: Any, params: Mapping[str, Any]) -> Callable[[int, int], Size]:
        backend = SimpleNamespace(**params)
        return lambda height, width: operation.place(backend, {}, height, width).size

    def decorate(cls: B) -> B:
        operation.declare(cls, 0)
        cls.takes = cls.gives = MAT
        cls.keeps_color = cls.keeps_nothing = True
        cls.isolation = Isolation.FOLLOWS if follows else Isolation.STAYS
        cls.setup, cls.forward_item = setup, forward_item  # type: ignore[method-assign]
        if resize is not None and not operation.reads:
            cls.sizes = classmethod(sizes)  # type: ignore[assignment]
        return cls

    return decorate


def on_images(
    operation: Operation, resize: Callable[[str], resampling.Resize] | None = None, is_batched: bool = False
) -> Callable[[B], B]:
    """Make a backend on Tensors, as ``on_mats``; ``is_batched``: a GPU resizes images of one size by one call."""
    is_float = resize is resampling.float_resize

    def setup(self: Any) -> None:
        self._resize = resize and resize(getattr(self, "interpolation", "bilinear"))

    def forward_tensor(self: Any, tensor: Any, item: Data) -> Any:
        _, channels, height, width = tensor.shape
        value_bytes = FLOAT_BYTES if is_float else tensor.element_size()
        placement = operation.placement(self, item, (height, width, channels), value_bytes)
        if getattr(self, "keep_original", False):
            original.keep(item, tensor, mats.color_of(item, channels, mats.OF_TENSORS))
        return place_tensor(tensor, placement, self._resize, getattr(self, "pad_value", 0))

    def decorate(cls: B) -> B:
        cls.data_format = data_format()  # type: ignore[attr-defined]
        cls.data_format.__set_name__(cls, "data_format")  # type: ignore[attr-defined]
        operation.declare(cls, 1)
        cls.gives = TENSOR
        for method in (setup, forward_tensor):
            setattr(cls, method.__name__, method)
        if is_batched:
            cls.forward = _resize_together  # type: ignore[method-assign]
        return on_tensors(cls)

    return decorate


def _resize_together(self: Any, items: list[Data]) -> None:
    """Resize images of one size on a GPU by one call, which costs the host as little as a single image.

    NOTE: not on the CPU, where a copy that does not fit into the cache costs more than the calls.
    """
    import torch

    size = self.resize_h, self.resize_w
    groups: dict[Any, list[tuple[Data, Any]]] = {}
    for item in items:
        try:
            tensor = tensor_of(self, item)
            _, channels, height, width = tensor.shape
            STRETCH.placement(self, item, (height, width, channels), FLOAT_BYTES)
            if self.keep_original:
                original.keep(item, tensor, mats.color_of(item, channels, mats.OF_TENSORS))
        except InvalidRequest as error:
            item[TASK_ERROR_KEY] = error
            continue
        key = (tensor.shape, tensor.dtype, tensor.device) if tensor.is_cuda else id(item)
        groups.setdefault(key, []).append((item, tensor))
    for group in groups.values():
        most = max(1, MOST_VALUES // group[0][1].numel())
        for start in range(0, len(group), most):
            part = group[start : start + most]
            batch = torch.cat([tensor for _, tensor in part]) if len(part) > 1 else part[0][1]
            for (item, _), row in zip(part, self._resize(batch, *size).split(1), strict=True):
                item[TASK_RESULT_KEY] = row


# -- the operations ---------------------------------------------------------------------------------------------------


def pad_value(default: int) -> Param:
    """The parameter ``pad_value``."""
    return Param(to_int, default, low=0, high=255, doc="value of the padding in every channel")


def output(height: str, width: str) -> dict[str, Param]:
    """Parameters for the sides of the result."""
    return {height: geometry.side("output height, pixels"), width: geometry.side("output width, pixels")}


def border(where: str) -> Param:
    """A number of pixels to add."""
    return Param(to_int, 0, low=0, high=geometry.MAX_SIDE, doc=f"pixels to add {where}, unless the dict says it")


KEEP_ORIGINAL = {
    "keep_original": Param(to_bool, False, doc="put the image before this step into the dict, as original")
}
OPENCV_FLAG = mats.interpolation(), resampling.interpolation()
SMOOTH = Param(to_str, "bilinear", choices=("bilinear", "bicubic"), doc="as torchvision's InterpolationMode")


STRETCH = Operation(
    lambda backend, item, height, width: Placement((backend.resize_h, backend.resize_w)),
    {"interpolation": OPENCV_FLAG, **output("resize_h", "resize_w"), **KEEP_ORIGINAL},
    ("resize_h", "resize_w"),
)


@on_mats(STRETCH, mats.opencv_resize, follows=True)
class ResizeMat(ItemBackend):
    """Mat to Mat of ``resize_h`` × ``resize_w`` by ``cv2.resize``; the aspect ratio is not kept."""


@on_images(STRETCH, resampling.float_resize, is_batched=True)
class ResizeTensor(ItemBackend):
    """Tensor 1×C×H×W of any real dtype to float32, 1×C×``resize_h``×``resize_w``; the aspect ratio is not kept.

    Geometry of ``cv2.resize``: half-pixel centres, borders repeated, no smoothing when it shrinks but by ``area``.
    Values keep their scale and are neither rounded nor clamped: ``bicubic`` can leave 0..255. Always a copy; on a GPU
    those of images of one size that come in one batch share memory.
    """


PILLOW_STRETCH = Operation(STRETCH.place, {**output("resize_h", "resize_w"), **KEEP_ORIGINAL}, STRETCH.sides)


@on_mats(PILLOW_STRETCH, mats.pillow_resize, mats.EIGHT_BITS, follows=True)
class PillowResizeMat(ItemBackend):
    """Mat to Mat of ``resize_h`` × ``resize_w``, bit-exact with Pillow's bilinear, which smooths when it shrinks."""


@on_images(PILLOW_STRETCH, resampling.pillow_resize)
class PillowResizeTensor(ItemBackend):
    """Tensor 1×C×H×W to 1×C×``resize_h``×``resize_w``, uint8, bit-exact with Pillow's bilinear, which smooths.

    It follows ``Resample.c`` of the Pillow that is installed. Every channel is resized by itself, as in modes L and
    RGB; an alpha channel is not multiplied in. Always a copy. ``InvalidRequest`` for a Tensor that is not uint8.
    """


SHORTER = Operation(
    lambda backend, item, height, width: geometry.shorter_side(height, width, backend.size),
    {
        "size": geometry.side("the shorter side, pixels"),
        "interpolation": SMOOTH,
        "max_pixels": geometry.max_pixels(),
        **KEEP_ORIGINAL,
    },
)


@on_mats(SHORTER, mats.pillow_resize, mats.EIGHT_BITS, follows=True)
class ResizeShorterMat(ItemBackend):
    """Mat to Mat with ``size`` as its shorter side, bit-exact with torchvision's ``Resize(size)`` on a PIL image.

    It smooths when it shrinks (``antialias``). ``InvalidRequest`` for a Mat that is not ``uint8``, and for one so long
    that more than ``max_pixels`` would come out.
    """


@on_images(SHORTER, resampling.smooth_resize)
class ResizeShorterTensor(ItemBackend):
    """Tensor to one with ``size`` as its shorter side, of its dtype, as torchvision's ``Resize(size)`` on a tensor.

    It smooths when it shrinks (``antialias``). ``uint8`` is rounded: photographs are one level away from
    ``ResizeShorterMat`` at most, two with ``bicubic``. ``InvalidRequest`` for an image so long that more than
    ``max_pixels`` would come out.
    """


FIT = Operation(
    lambda backend, item, height, width: geometry.fit_inside(height, width, backend.max_h, backend.max_w),
    {"interpolation": OPENCV_FLAG, **output("max_h", "max_w"), "pad_value": pad_value(0), **KEEP_ORIGINAL},
    ("max_h", "max_w"),
)


@on_mats(FIT, mats.opencv_resize)
class ResizePadMat(ItemBackend):
    """Mat to Mat of ``max_h`` × ``max_w``: the largest that fits with its aspect ratio, top left, the rest padded.

    Writes ``inverse_trans(x, y)``, which maps a point of the output to the input, in pixels.
    """


@on_images(FIT, resampling.float_resize)
class ResizePadTensor(ItemBackend):
    """Tensor to float32, 1×C×``max_h``×``max_w``: the largest that fits with its aspect ratio, top left, padded.

    Writes ``inverse_trans(x, y)``, which maps a point of the output to the input, in pixels. Size and place are those
    of ``ResizePadMat``, values those of ``ResizeTensor``.
    """


FIT_CENTRED = Operation(
    lambda backend, item, height, width: geometry.fit_inside(height, width, backend.max_h, backend.max_w, centred=True),
    {**FIT.params, "pad_value": pad_value(114)},
    FIT.sides,
)


@on_mats(FIT_CENTRED, mats.opencv_resize)
class LetterBoxMat(ItemBackend):
    """As ``ResizePadMat``, but in the middle, as YOLO models take it, by default on gray.

    Of an odd padding, the larger half is below or on the right, as in Ultralytics' LetterBox.
    """


@on_images(FIT_CENTRED, resampling.float_resize)
class LetterBoxTensor(ItemBackend):
    """As ``ResizePadTensor``, but in the middle, as YOLO models take it, by default on gray; see ``LetterBoxMat``."""


def _named_size(backend: Any, item: Data, height: int, width: int) -> Placement:
    size = geometry.wanted_size(item)
    return (
        geometry.fit_inside(height, width, *size)._replace(inverse_trans=None)
        if backend.keep_aspect
        else Placement(size)
    )


NAMED_SIZE = Operation(
    _named_size,
    {
        "interpolation": OPENCV_FLAG,
        "keep_aspect": Param(to_bool, False, doc="whether to pad instead of stretching"),
        "pad_value": pad_value(0),
        "max_pixels": geometry.max_pixels(),
        **KEEP_ORIGINAL,
    },
    reads=(geometry.HEIGHT_KEY, geometry.WIDTH_KEY),
)


@on_mats(NAMED_SIZE, mats.opencv_resize)
class DynamicResizeMat(ItemBackend):
    """Mat to Mat of the dict's ``resize_h`` × ``resize_w`` by ``cv2.resize``; the aspect ratio is kept only if asked.

    With ``keep_aspect`` it becomes as large as fits, top left, and the rest is padded with ``pad_value``. The sides are
    integers from 1 to 2**20, in pixels, their product ``max_pixels`` at most; ``AlignMat`` writes them. A side that is
    missing, not an integer or out of these bounds, or a value that is not a Mat: no ``result``, but an
    ``InvalidRequest`` as ``error``.
    """


@on_images(NAMED_SIZE, resampling.float_resize)
class DynamicResizeTensor(ItemBackend):
    """Tensor to float32 of the dict's ``resize_h`` × ``resize_w``; the aspect ratio is kept only if asked.

    As ``DynamicResizeMat``, with the values of ``ResizeTensor``.
    """


CROP = Operation(lambda backend, item, height, width: geometry.crop_box(item, height, width), {}, reads=(TASK_BOX_KEY,))


@on_mats(CROP)
class CropMat(ItemBackend):
    """The part of a Mat H×W×C that ``box`` in the dict names: [left, top, right, bottom] in pixels; a contiguous copy.

    ``box`` is a list, tuple or array of four numbers; right and bottom are the first pixels outside. Fractions are
    rounded, and parts outside the image are cut off, as by ``CropTensor``. No ``result``, but an
    ``InvalidRequest`` as ``error``: a box that is missing, is not four finite numbers, or leaves no pixel; a value
    that is not a Mat.
    """


@on_images(CROP)
class CropTensor(ItemBackend):
    """The part of a Tensor 1×C×H×W that ``box`` in the dict names: [left, top, right, bottom] in pixels; a copy.

    ``box`` is a list, tuple, array or tensor of four numbers; right and bottom are the first pixels outside. Fractions
    are rounded, and parts outside the image are cut off. A box that is missing, is not four finite numbers, or
    leaves no pixel: no ``result``, ``error`` is an ``InvalidRequest``.
    """


MIDDLE = Operation(
    lambda backend, item, height, width: geometry.center_crop(height, width, backend.crop_h, backend.crop_w),
    output("crop_h", "crop_w"),
    ("crop_h", "crop_w"),
)


@on_mats(MIDDLE, follows=True)
class CenterCropMat(ItemBackend):
    """The middle ``crop_h`` × ``crop_w`` of a Mat, as torchvision's ``CenterCrop``; a smaller Mat is padded with 0.

    A contiguous copy.
    """


@on_images(MIDDLE)
class CenterCropTensor(ItemBackend):
    """The middle ``crop_h`` × ``crop_w`` of a Tensor, as torchvision's ``CenterCrop``; a smaller one is padded with 0.

    Of the dtype of the Tensor; a contiguous copy.
    """


def _with_border(backend: Any, item: Data, height: int, width: int) -> Placement:
    keys = "top", "bottom", "left", "right"
    top, bottom, left, right = (
        geometry.wanted_pixels(item, key, 0) if key in item else getattr(backend, key) for key in keys
    )
    return Placement((height, width), None, (top + height + bottom, left + width + right), top, left)


BORDER = Operation(
    _with_border,
    {
        "top": border("above"),
        "bottom": border("below"),
        "left": border("on the left"),
        "right": border("on the right"),
        "pad_value": pad_value(0),
        "max_pixels": geometry.max_pixels(),
    },
    reads=("top", "bottom", "left", "right"),
)


@on_images(BORDER)
class CopyMakeBorderTensor(ItemBackend):
    """Tensor to one with ``top``, ``bottom``, ``left`` and ``right`` more pixels, of ``pad_value``; always a copy.

    A number in the dict of the request comes before the parameter of that name. ``InvalidRequest`` for one that is not
    an integer from 0 to 2**20, and for more than ``max_pixels`` altogether.
    """
