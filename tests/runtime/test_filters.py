"""Filters at a node's entry and inside ``Sequential``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import Register

from torchpipe_py import DecodeError, ItemBackend, pipe

Data = dict[str, Any]


class Mark(ItemBackend):
    """Appends a mark to data; data that ends with ``-`` gives no result."""

    def forward_item(self, item: Data) -> None:
        if not item["data"].endswith("-"):
            item["result"] = item["data"] + "+"


@pytest.mark.parametrize("form", ["S[DecodeMat,(or){0}]", "nodes"])
def test_or_is_a_second_way(register: Register, jpeg: bytes, form: str) -> None:
    class Fallback(ItemBackend):
        """A result for bytes that are no image."""

        def forward_item(self, item: Data) -> None:
            assert "error" not in item
            item["result"] = "no image"

    name = register(Fallback)
    nodes: dict[str, Any] = {"a": {"backend": "DecodeMat", "next": "b"}, "b": {"backend": name, "filter": "or"}}
    good, bad = {"data": jpeg}, {"data": b"no image"}
    with pipe(nodes if form == "nodes" else {"backend": form.format(name)}) as p:
        p([good, bad])
    assert good["result"].shape == (375, 500, 3)  # type: ignore[attr-defined]
    assert bad == {"data": b"no image", "result": "no image"}


def test_a_sequence_ends_where_there_is_no_result() -> None:
    data: Data = {"data": b"no image"}
    with pipe({"backend": "S[DecodeMat,ResizeMat]", "resize_h": 2, "resize_w": 2}) as p:
        p(data)
    assert data.keys() == {"data", "error"}
    assert isinstance(data["error"], DecodeError)


@pytest.mark.parametrize("works_by_item", [True, False])
def test_items_of_one_batch_go_their_own_ways(register: Register, works_by_item: bool) -> None:
    class Eight(ItemBackend):
        """result = data + "!"; takes eight at once."""

        def forward_item(self, item: Data) -> None:
            item["result"] = item["data"] + "!"

        def max(self) -> int:
            return 8

        def forward_one(self) -> Callable[[Data], object] | None:
            return super().forward_one() if works_by_item else None

    name = register(Mark)
    items = [{"data": text} for text in ("a", "-", "b", "c-", "d")]
    with pipe({"backend": f"S[{name},{register(Eight)},(skip){name}]"}) as p:
        p(items)
    assert [item.get("result") for item in items] == ["a+!", None, "b+!", None, "d+!"]
