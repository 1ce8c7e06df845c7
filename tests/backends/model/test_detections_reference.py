"""Detectors against the reference implementations: Ultralytics, torchvision, and DETR's formulas; 500 outputs each.

Where these libraries are not installed, ``test_detections.py`` holds the same properties by formulas.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kit.detectors import SIZES, letterboxed, made, yolo_output

ultralytics_nms = pytest.importorskip("ultralytics.utils.nms")
ops = pytest.importorskip("ultralytics.utils.ops")
torchvision = pytest.importorskip("torchvision")

pytestmark = pytest.mark.slow

COUNT = 500
INPUT = (320, 416)


def compare(found: Any, wanted: np.ndarray) -> None:
    """The same boxes, in the same order: ``wanted`` K×6, [left, top, right, bottom, score, class]."""
    assert found.classes.tolist() == wanted[:, 5].astype(int).tolist()
    assert np.abs(found.scores - wanted[:, 4]).max(initial=0) <= 1e-4
    assert np.abs(found.boxes - wanted[:, :4]).max(initial=0) <= 0.02


def by_ultralytics(output: np.ndarray, size: tuple[int, int], **settings: Any) -> np.ndarray:
    """Ultralytics' own, in ``float64``: in ``float32`` it shifts boxes of class 79 by 600,000 pixels, and rounds."""
    (rows,) = ultralytics_nms.non_max_suppression(torch.from_numpy(output).double(), **settings)
    rows[:, :4] = ops.scale_boxes(INPUT, rows[:, :4], size)
    return rows.numpy()


@pytest.mark.parametrize("classes", [1, 2, 80])
@pytest.mark.parametrize("settings", [{}, {"class_agnostic": True}, {"iou": 0.45, "threshold": 0.4, "max_det": 20}])
def test_yolo_boxes_equal_those_of_ultralytics(classes: int, settings: dict[str, Any]) -> None:
    post = made("YoloBoxes", **settings)
    rng = np.random.default_rng(classes)
    options = {"conf_thres": settings.get("threshold", 0.25), "iou_thres": settings.get("iou", 0.7)}
    options |= {"agnostic": settings.get("class_agnostic", False), "max_det": settings.get("max_det", 300)}
    total = 0
    for index in range(COUNT):
        output = yolo_output(rng, classes, INPUT, int(rng.integers(0, 400)))
        size = SIZES[index % len(SIZES)]
        (found,) = post.forward([torch.from_numpy(output)], [letterboxed(size, INPUT)])
        compare(found, by_ultralytics(output, size, nc=classes, **options))
        total += len(found)
    assert total > COUNT


def test_classes_are_chosen_as_by_ultralytics() -> None:
    post = made("YoloBoxes", classes=("3", "5", "7"))
    rng = np.random.default_rng(0)
    for index in range(COUNT):
        output = yolo_output(rng, 10, INPUT, 200)
        size = SIZES[index % len(SIZES)]
        (found,) = post.forward([torch.from_numpy(output)], [letterboxed(size, INPUT)])
        options = {"conf_thres": 0.25, "iou_thres": 0.7, "classes": [3, 5, 7]}
        compare(found, by_ultralytics(output, size, nc=10, **options))


def test_end_to_end_boxes_equal_those_of_ultralytics() -> None:
    post = made("EndToEndBoxes")
    rng = np.random.default_rng(0)
    for index in range(COUNT):
        rows = rng.uniform(0, 320, (1, 300, 6)).astype(np.float32)
        rows[..., 4] = -np.sort(-rng.random(300))
        rows[..., 5] = rng.integers(0, 80, 300)
        size = SIZES[index % len(SIZES)]
        (found,) = post.forward([torch.from_numpy(rows)], [letterboxed(size, INPUT)])
        compare(found, by_ultralytics(rows, size, conf_thres=0.25))


def by_yolov5(output: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """YOLOv5's ``non_max_suppression`` in its words, with torchvision's NMS."""
    x = torch.from_numpy(output[0].copy())
    x = x[x[:, 4] > 0.25]
    x[:, 5:] *= x[:, 4:5]
    x = x.double()
    box = torch.cat([x[:, :2] - x[:, 2:4] / 2, x[:, :2] + x[:, 2:4] / 2], 1)
    conf, j = x[:, 5:].max(1, keepdim=True)
    x = torch.cat((box, conf, j.double()), 1)[conf.view(-1) > 0.25]
    x = x[x[:, 4].argsort(descending=True, stable=True)]
    x = x[torchvision.ops.nms(x[:, :4] + x[:, 5:6] * 7680, x[:, 4], 0.7)[:300]]
    x[:, :4] = ops.scale_boxes(INPUT, x[:, :4], size)
    return x.numpy()


def test_yolo5_boxes_equal_those_of_yolov5() -> None:
    post = made("Yolo5Boxes")
    rng = np.random.default_rng(0)
    for index in range(COUNT):
        columns = yolo_output(rng, 20, INPUT, 300)
        objectness = rng.uniform(0.5, 1, (1, 1, columns.shape[2])).astype(np.float32)
        output = np.ascontiguousarray(np.concatenate([columns[:, :4], objectness, columns[:, 4:]], 1).swapaxes(1, 2))
        size = SIZES[index % len(SIZES)]
        (found,) = post.forward([torch.from_numpy(output)], [letterboxed(size, INPUT)])
        compare(found, by_yolov5(output, size))


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_detr_boxes_equal_the_formulas_of_its_authors(activation: str) -> None:
    """``PostProcess`` of DETR (softmax without the last class), ``RTDETRPostProcessor`` (the best of all pairs)."""
    post = made("DetrBoxes", activation=activation)
    rng = np.random.default_rng(0)
    for index in range(COUNT):
        boxes = torch.from_numpy(rng.uniform(0, 1, (1, 100, 4)).astype(np.float32))
        logits = torch.from_numpy(rng.normal(-2, 2.5, (1, 100, 12)).astype(np.float32))
        height, width = size = SIZES[index % len(SIZES)]
        item = {"data": np.zeros((64, 64, 3), np.uint8), "image_size": size}
        item["to_original"] = (width / 64, height / 64, 0.0, 0.0)
        (found,) = post.forward([logits, boxes], [item])
        xyxy = torchvision.ops.box_convert(boxes[0], "cxcywh", "xyxy") * torch.tensor([width, height] * 2)
        if activation == "softmax":
            scores, labels = logits[0].softmax(-1)[:, :-1].max(-1)
        else:
            scores, flat = torch.topk(logits[0].sigmoid().flatten(), 300)
            labels, xyxy = flat % 12, xyxy[flat // 12]
        rows = torch.cat([xyxy, scores[:, None], labels[:, None].float()], 1)[scores > 0.25]
        rows = rows[rows[:, 4].argsort(descending=True, stable=True)][:300]
        rows[:, [0, 2]] = rows[:, [0, 2]].clamp(0, width)
        rows[:, [1, 3]] = rows[:, [1, 3]].clamp(0, height)
        compare(found, rows.numpy())


def test_boxes_scores_labels_equal_what_torchvision_gives() -> None:
    """torchvision's own ``GeneralizedRCNNTransform`` leads back from the resized image."""
    from torchvision.models.detection.transform import resize_boxes

    post = made("BoxesScoresLabels", threshold=0.05)
    rng = np.random.default_rng(0)
    for index in range(COUNT):
        height, width = size = SIZES[index % len(SIZES)]
        resized = (max(1, height * 2 // 3), max(1, width * 2 // 3))
        boxes = torch.from_numpy(rng.uniform(0, 1, (20, 4)).astype(np.float32)) * torch.tensor([*resized[::-1]] * 2)
        scores = torch.from_numpy(-np.sort(-rng.random(20)).astype(np.float32))
        labels = torch.from_numpy(rng.integers(1, 91, 20))
        item = {"data": torch.zeros(1, 3, *resized), "image_size": size}
        item["to_original"] = (width / resized[1], height / resized[0], 0.0, 0.0)
        (found,) = post.forward([boxes, labels, scores], [item])
        wanted = torch.cat([resize_boxes(boxes, resized, size), scores[:, None], labels[:, None].float()], 1)
        compare(found, wanted[scores > 0.05].numpy())


@pytest.mark.parametrize("classes", [1, 3, 80])
def test_nms_equals_torchvisions_to_the_order(classes: int) -> None:
    from torchpipe_py.backends.model.postprocess.nms import suppress

    rng = np.random.default_rng(classes)
    for count in rng.integers(0, 3000, 60).tolist():
        centres, objects = rng.uniform(0, 600, (max(1, count // 20), 2)), rng.integers(0, max(1, count // 20), count)
        middle, half = centres[objects] + rng.normal(0, 6, (count, 2)), rng.uniform(5, 40, (count, 2))
        boxes = torch.from_numpy(np.concatenate([middle - half, middle + half], 1).astype(np.float32))
        scores = torch.from_numpy(rng.random(count).astype(np.float32)).sort(descending=True)[0]
        labels = torch.from_numpy(rng.integers(0, classes, count))
        wanted = torch.zeros(count, dtype=torch.bool)
        for label in labels.unique():  # ``batched_nms`` does so for many boxes; of few it rounds
            own = torch.where(labels == label)[0]
            wanted[own[torchvision.ops.nms(boxes[own], scores[own], 0.5)]] = True
        found = suppress(boxes.numpy(), labels.numpy(), 0.5, count)
        assert found.tolist() == torch.where(wanted)[0].tolist()


# -- masks and keypoints ----------------------------------------------------------------------------------------------


def segments_output(rng: np.random.Generator, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Boxes with 32 coefficients, and smooth prototypes as networks have them."""
    import cv2

    output = yolo_output(rng, classes, INPUT, 25)
    coefficients = rng.normal(0, 1, (1, 32, output.shape[2])).astype(np.float32)
    shape = INPUT[0] // 4, INPUT[1] // 4
    coarse = rng.normal(0, 1, (32, 12, 12)).astype(np.float32)
    prototypes = np.stack([cv2.resize(plane, shape[::-1], interpolation=cv2.INTER_CUBIC) for plane in coarse])[None]
    return np.concatenate([output, coefficients], 1), prototypes


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_masks_equal_those_of_ultralytics_at_the_original_size() -> None:
    from pycocotools import mask as coco

    posts = {form: made("YoloSegments", masks=form) for form in ("arrays", "rle", "png", "polygons")}
    rng = np.random.default_rng(0)
    least, total = 1.0, 0
    for index in range(COUNT):
        output, prototypes = segments_output(rng, 3)
        size = SIZES[index % len(SIZES)]
        tensors, item = [torch.from_numpy(output), torch.from_numpy(prototypes)], letterboxed(size, INPUT)
        (found,) = posts["arrays"].forward(tensors, [item])
        (rows,) = ultralytics_nms.non_max_suppression(
            torch.from_numpy(output), nc=3, conf_thres=0.25, iou_thres=0.7, max_det=300
        )
        rows[:, :4] = ops.scale_boxes(INPUT, rows[:, :4], size)
        masks = ops.process_mask_native(tensors[1][0], rows[:, 6:], rows[:, :4], size)
        kept = masks.amax((-2, -1)) > 0
        rows, wanted = rows[kept], masks[kept].numpy().astype(bool)
        compare(found, rows[:, :6].numpy())
        for mask, other in zip(found.masks, wanted, strict=True):
            common, either = (mask & other).sum(), (mask | other).sum()
            assert common / either >= 0.999 or either - common <= 1  # of few pixels, one may round
            least = min(least, common / either)
        total += len(found)
        if index % 10 == 0:
            import cv2

            (runs,), (files,), (outlines,) = (
                posts[form].forward(tensors, [item]) for form in ("rle", "png", "polygons")
            )
            for mask, run, file, polygons in zip(found.masks, runs.masks, files.masks, outlines.masks, strict=True):
                assert np.array_equal(coco.decode(run).astype(bool), mask)
                assert run["counts"] == coco.encode(np.asfortranarray(mask.astype(np.uint8)))["counts"].decode()
                assert np.array_equal(cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_UNCHANGED) > 0, mask)
                drawn = cv2.drawContours(np.zeros(size, np.uint8), [np.array(each) for each in polygons], -1, 1, -1)
                assert (drawn.astype(bool) | mask == drawn.astype(bool)).all()  # holes are filled
    print(f"{total} masks, the least IoU is {least:.5f}")


def test_keypoints_equal_those_of_ultralytics() -> None:
    post = made("YoloPose", keypoints=17)
    rng = np.random.default_rng(0)
    for index in range(COUNT):
        output = yolo_output(rng, 1, INPUT, 100)
        points = rng.uniform(-10, 430, (1, 51, output.shape[2])).astype(np.float32)
        output = np.concatenate([output, points], 1)
        size = SIZES[index % len(SIZES)]
        (found,) = post.forward([torch.from_numpy(output)], [letterboxed(size, INPUT)])
        rows = by_ultralytics(output, size, nc=1, conf_thres=0.25, iou_thres=0.7)
        compare(found, rows[:, :6])
        wanted = ops.scale_coords(INPUT, torch.from_numpy(rows[:, 6:]).view(-1, 17, 3), size)
        assert np.abs(found.keypoints - wanted.numpy()).max(initial=0) <= 0.02
