"""Measures of a pair of results, and tolerances of them."""

from __future__ import annotations

import numpy as np
import pytest

from torchpipe_py import Detections
from torchpipe_py.backends.model.postprocess.masks import FORMS, Window
from torchpipe_py.tools.compare_models.figures import Objects, Prediction
from torchpipe_py.tools.compare_models.masks import mask_iou
from torchpipe_py.tools.compare_models.measures import of_classes, of_detections, of_maps, of_vectors
from torchpipe_py.tools.compare_models.predicted import as_result
from torchpipe_py.tools.compare_models.tolerance import Judge, Verdict, read_tolerance

# -- measures ---------------------------------------------------------------------------------------------------------


def test_detections_are_matched_by_iou_within_a_class() -> None:
    a = Detections(
        [[0, 0, 10, 10], [20, 0, 30, 10], [50, 0, 60, 10], [50, 0, 60, 10]], [0.9, 0.8, 0.7, 0.6], [0, 1, 0, 1]
    )
    b = Detections(
        [[20.5, 0, 30.5, 10], [0, 0, 10, 9], [50, 0, 60, 10], [80, 0, 90, 10]], [0.7, 0.85, 0.7, 0.2], [1, 0, 2, 0]
    )
    figures, objects = of_detections(a, b)
    assert objects == Objects(4, 4, 2)
    assert figures == {
        "missing": 0.5,
        "additional": 0.5,
        "score": pytest.approx(0.1),
        "box": pytest.approx(1.0),
    }
    twice = Detections([[0, 0, 10, 10]] * 2, [0.9, 0.6], [0, 0])
    assert of_detections(twice, twice[::-1])[0]["score"] == 0
    names = ("cat", "dog", "owl")
    swapped = Detections(a.boxes, a.scores, [1, 0, 1, 0], ("dog", "cat", "owl"))
    assert of_detections(Detections(a.boxes, a.scores, a.classes, names), swapped)[0]["missing"] == 0
    none = Detections(np.empty((0, 4)), [], [])
    assert of_detections(none, none) == ({"missing": 0.0, "additional": 0.0}, Objects(0, 0, 0))
    assert of_detections(none, a)[0] == {"missing": 0.0, "additional": 1.0}


def test_keypoints_and_masks_of_matched_objects_are_measured() -> None:
    points = np.array([[[1, 1, 0.9], [5, 5, 0.1]]])
    moved = np.array([[[4, 5, 0.9], [14, 14, 0.1]]])
    mask = np.zeros((20, 20), bool)
    mask[2:8, 2:10] = True
    a = Detections([[0, 0, 10, 10]], [0.9], [0], keypoints=points, masks=(mask,))
    b = Detections([[0, 0, 10, 10]], [0.9], [0], keypoints=moved, masks=(mask.T,))
    figures, _ = of_detections(a, b)
    assert (figures["keypoint"], figures["iou"]) == (5, pytest.approx(36 / 60))


def test_masks_of_every_form_are_the_same_mask() -> None:
    pixels = np.zeros((9, 14), bool)
    pixels[1:8, 2:12] = True
    pixels[4:, 9:] = False
    forms = {name: form(Window(pixels, 3, 5, (30, 40))) for name, form in FORMS.items()}
    assert {(one, other): mask_iou(forms[one], forms[other]) for one in forms for other in forms} == dict.fromkeys(
        [(one, other) for one in forms for other in forms], 1.0
    )
    whole, ring = forms["arrays"], forms["arrays"].copy()
    ring[5:7, 8:10] = False
    assert (mask_iou(ring, forms["polygons"]), mask_iou(ring, whole)) == (1, pytest.approx(1 - 4 / whole.sum()))
    empty = np.zeros((30, 40), bool)
    assert (mask_iou(empty, empty), mask_iou(empty, forms["rle"])) == (1, 0)


def test_classes_maps_and_vectors_are_measured() -> None:
    assert of_classes(Prediction("a", 0.5), Prediction("a", 0.75)) == {"top1": 1, "score": 0.25}
    assert of_classes(Prediction("a", 0.5), Prediction("b", 0.5)) == {"top1": 0}
    several = Prediction("a", 0.5, ("a", "b")), Prediction("a", 0.5, ("a",))
    assert of_classes(*several) == {"top1": 1, "score": 0, "labels": 0}
    assert of_maps(np.array([[0, 0, 7, 7]]), np.array([[0, 7, 7, 7]])) == {
        "iou": pytest.approx((1 / 2 + 2 / 3) / 2),
        "changed": 0.25,
    }
    assert of_vectors(np.array([1.0, 0]), np.array([3.0, 4])) == {"cosine": pytest.approx(0.6)}
    assert [of_vectors(np.zeros(2), np.array(other)) for other in ([0.0, 0], [0, 1.0])] == [
        {"cosine": 1},
        {"cosine": 0},
    ]


def test_results_of_functions_are_those_of_pipes() -> None:
    boxes, scores = [[0, 0, 4, 4], [1, 1, 9, 9]], [0.5, 0.25]
    masks = np.zeros((2, 1, 9, 9), np.float32)
    masks[:, :, 2:4] = 1
    found = as_result([{"boxes": boxes, "scores": scores, "labels": [3, 1], "masks": masks}])["result"]
    assert found[:0] == Detections(np.empty((0, 4)), [], [], masks=())
    assert (found.classes.tolist(), [mask.shape for mask in found.masks]) == ([3, 1], [(9, 9), (9, 9)])
    rows = Detections(boxes, scores, [3, 1]).to_list()
    assert as_result(rows)["result"] == Detections(boxes, scores, [3, 1])
    assert as_result(rows[:1])["result"] == Detections(boxes[:1], scores[:1], [3])
    named = as_result([{**row, "label": label} for row, label in zip(rows, "yx", strict=True)])["result"]
    assert named.labels == ["y", "x"]
    for value in (("ring", 0.5), [("ring", 0.5)], "ring", [0.25, 0.75]):
        assert as_result(value)["result"] == value


# -- tolerances -------------------------------------------------------------------------------------------------------


def test_tolerance_names_what_is_wrong_and_the_nearest_valid_name() -> None:
    for text, problem in (
        ("scores=0.1", "'scores' is not measured; did you mean 'score'?"),
        ("top1", "expected top1=NUMBER, as top1=0.99, got 'top1'"),
        ("score=small", "expected score=NUMBER, as score=0.01, got 'score=small'"),
        ("top1=1", "top1: expected a share above 0 and below 1, got 1; a sample of images can show 0.999, never all"),
        ("missing=0", "missing: expected a share above 0 and below 1, got 0; a sample of images can show 0.001, never"),
        ("top1=0.9999999999999999", "top1: expected a share above 0 and below 1, got 0.9999999999999999; a sample"),
        ("top1=1e-320", "top1: expected a share above 0 and below 1, got 1e-320; a sample of images can show 0.001"),
        ("images=1, score=1", "images: expected a share above 0 and below 1, got 1"),
        ("cosine=1.1", "cosine: expected a number from 0 to 1, got 1.1"),
        ("box=-1", "box: expected a number, at least 0, got -1"),
        ("box=nan", "box: expected a number, at least 0, got nan"),
        ("box=1, box=2", "box is there twice"),
        ("", "no limit; for example top1=0.999, score=0.01"),
        ("images=0.9", "no limit; for example"),
    ):
        with pytest.raises(ValueError, match="^" + problem.replace("?", r"\?")):
            read_tolerance(text)
    for text in (
        "top1=0.999, score=0.01",
        "box=0.02, missing=0.001, images=0.95",
        "score=0.012345678, images=0.9876543",
        "max=1234567.5",
    ):
        assert str(read_tolerance(text)) == text


def test_images_decide_a_tolerance_as_soon_as_they_can() -> None:
    good, bad = {"top1": 1.0, "score": 0.001}, {"top1": 1.0, "score": 0.5}
    for images, verdict in (
        ([good] * 400, Verdict.UNDECIDED),
        ([good] * 440, Verdict.WITHIN),
        ([bad] * 3, Verdict.BEYOND),
        ([None] * 3, Verdict.BEYOND),  # only one side has a result
        ([{"top1": 0.0}] * 3, Verdict.BEYOND),  # no score of the same class, and no limit of top1
        ([], Verdict.UNDECIDED),
    ):
        judge = Judge(read_tolerance("score=0.01"))
        for figures in images:
            judge.add(figures)
        (finding,) = judge.findings()
        assert judge.verdict() is finding.verdict is verdict, (images[:1], finding)
        assert (finding.low <= 0.01 < finding.high) == (verdict is Verdict.UNDECIDED)
    judge = Judge(read_tolerance("score=0.01, top1=0.9"))
    judge.add({"top1": 0.0})
    assert [finding.images for finding in judge.findings()] == [0, 1]


def test_masks_of_one_side_only_do_not_keep_a_limit() -> None:
    box, mask = [[0, 0, 3, 3]], np.ones((4, 4), bool)
    a, b = (Detections(box, [0.9], [0], (), None, masks) for masks in ((mask,), None))
    found, _ = of_detections(a, b)
    assert read_tolerance("iou=0.9").limits[0].loss(found, ("iou",)) == 1.0


def test_outline_without_points_is_an_empty_mask() -> None:
    assert mask_iou([[]], np.zeros((4, 4), bool)) == 1.0
