from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from converters.manifest_text import with_value
from nereid_backend.errors import ManifestError

WITH = "weights_file: weights.T.safetensors"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('format_version: "2.0"\nname: m\n', f'format_version: "2.0"\n{WITH}\nname: m\n'),
        (
            "# a\nname: m # b\nformat_version: 2 # c\n\n# d\n",
            f"# a\nname: m # b\nformat_version: 2 # c\n{WITH}\n\n# d\n",
        ),
        ("name: m\nformat_version: 2.0", f"name: m\nformat_version: 2.0\n{WITH}\n"),
        ("---\n  format_version: 2\n  name: m\n", f"---\n  format_version: 2\n  {WITH}\n  name: m\n"),
        ("format_version: '2.0'\r\nname: m\r\n", f"format_version: '2.0'\r\n{WITH}\r\nname: m\r\n"),
        ("{format_version: 2, name: m} # one line\n", f"{{format_version: 2, {WITH}, name: m}} # one line\n"),
        (
            "format_version: 2\nweights_file: 'weights.safetensors'  # ours\n",
            "format_version: 2\nweights_file: 'weights.T.safetensors'  # ours\n",
        ),
        (
            "description: |\n  weights_file: no\nformat_version: 2\n",
            f"description: |\n  weights_file: no\nformat_version: 2\n{WITH}\n",
        ),
    ],
    ids=["block", "comments", "no newline at the end", "indented", "crlf", "flow", "there already", "text like it"],
)
def test_one_line_changes_and_the_rest_stays_as_written(before: str, after: str) -> None:
    assert with_value(before, "weights_file", "weights.T.safetensors") == after


@pytest.mark.parametrize(
    "text",
    [
        'format_version: "2.0" # why\nname: m\n',
        "# a\nname: m # b\nformat_version: 2 # c\n\n# d\n",
        "---\n  format_version: 2\n  name: m\n",
        "format_version: '2.0'\r\nname: m\r\n",
        "{format_version: 2, name: m} # one line\n",
        "format_version: 2\nlong: &a [1, 2]\nother: *a\n",
    ],
)
def test_a_line_that_was_added_is_removed_without_a_trace(text: str) -> None:
    assert with_value(with_value(text, "weights_file", "w.T.safetensors"), "weights_file", None) == text


def test_the_comment_of_a_removed_line_stays() -> None:
    text = "a: 1\nweights_file: w # ours\nformat_version: 2\n"
    assert with_value(text, "weights_file", None) == "a: 1\n# ours\nformat_version: 2\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('format_version: "2.0" # old\nx: 2.0\n', 'format_version: "2.1" # old\nx: 2.0\n'),
        ("{'format_version': 2}", "{'format_version': 2.1}"),
        ('{"format_version": "2.0"}', '{"format_version": "2.1"}'),
    ],
)
def test_a_value_is_changed_in_place_and_in_its_own_quotes(before: str, after: str) -> None:
    assert with_value(before, "format_version", "2.1") == after


@pytest.mark.parametrize(
    "text",
    [
        "format_version: 2\nformat_version: 2\n",
        "format_version: &v 2\nother: *v\n",
        "weights_file: a\nformat_version: 2\nweights_file: b\n",
        "{format_version: 2, # why\n weights_file: b}\n",
        "name: m\n",
        "[1]",
        "",
        "a: [",
        "a: 1\n---\nb: 2\n",
        "[" * 2000,
    ],
    ids=lambda text: text[:20],
)
def test_what_cannot_be_edited_for_certain_is_refused(text: str) -> None:
    def migrated() -> None:
        with_value(with_value(text, "format_version", "2.1"), "weights_file", None)

    with pytest.raises(ManifestError, match=r"^manifest\.yaml: is "):
        migrated()


scalars = st.booleans() | st.integers() | st.text(max_size=8) | st.none()
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3))
names = st.text("abcdefgh.", min_size=1, max_size=8).filter(lambda text: text.strip("."))


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text(max_size=6), values, max_size=5), names, st.booleans() | st.none(), st.integers(0, 6))
def test_whatever_else_a_manifest_holds_it_reads_the_same_afterwards(
    other: dict[str, object], name: str, flow: bool | None, position: int
) -> None:
    items = [(key, value) for key, value in other.items() if key not in ("format_version", "weights_file")]
    items.insert(position, ("format_version", "2.0"))
    text = yaml.safe_dump(dict(items), sort_keys=False, default_flow_style=flow, allow_unicode=True)
    meant = yaml.safe_load(text)
    edited = with_value(text, "weights_file", f"{name}.safetensors")
    assert yaml.safe_load(edited) == {**meant, "weights_file": f"{name}.safetensors"}
    assert yaml.safe_load(with_value(edited, "weights_file", None)) == meant
