"""Nothing from outside becomes markup."""

from __future__ import annotations

import json
from html.parser import HTMLParser

from moetrace_collectors.views.markup import Markup, data_block, number, table, tag

HOSTILE = "</script><script>alert('x')</script>\" onload=\"y & <b>"


class Reader(HTMLParser):
    """Collects tags, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the tag."""
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        """Collect the text."""
        self.text += data


def read(text: str) -> Reader:
    """A page as a browser splits it."""
    reader = Reader()
    reader.feed(text)
    reader.close()
    return reader


def test_text_and_attributes_are_escaped() -> None:
    """A hostile name stays one text and one attribute value."""
    reader = read(tag("p", HOSTILE, title=HOSTILE))
    assert reader.tags == ["p"]
    assert reader.attributes == [("title", HOSTILE)]
    assert reader.text == HOSTILE


def test_markup_is_not_escaped_twice() -> None:
    """Elements nest."""
    assert tag("p", tag("b", "1 < 2")) == Markup("<p><b>1 &lt; 2</b></p>")


def test_data_block_cannot_be_closed_by_a_value() -> None:
    """JSON in a page comes back unchanged, whatever strings it holds."""
    block = data_block("d", {"name": HOSTILE})
    assert block.count("</script>") == 1
    body = block.partition(">")[2].removesuffix("</script>")
    assert json.loads(body) == {"name": HOSTILE}


def test_table_cells_are_escaped() -> None:
    """A table takes text as text."""
    assert "script" not in read(table(["Name"], [[HOSTILE]])).tags


def test_coordinates_are_short() -> None:
    """Numbers carry two decimals at most and no trailing zeros: pages of many cells stay small."""
    assert [number(1.0), number(0.126), number(-0.001)] == ["1", "0.13", "0"]
