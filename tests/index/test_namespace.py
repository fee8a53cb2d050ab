"""Identity: golden vectors, and what a digest is of. Field by field: `test_conformance.py`."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.index.errors import KvtierError
from kvtier.index.namespace import digest_fields
from tests.index.helpers import BASE, LAYOUT

# Written down once; a change means that every store on disk misses.
GOLDEN = "09283795d6670ef025418fd7c11694ab8663b7d9050e6fd291d8d350f31452e3"
GOLDEN_FIELDS = "36e359b5b993422c8649313971cee8066924d74f2b7cb6c593040eb587fed3c9"


def test_the_digest_has_not_changed() -> None:
    assert BASE.digest.hex() == GOLDEN
    assert digest_fields("domain", [("a", 1), ("b", "x")]).hex() == GOLDEN_FIELDS


def test_equal_namespaces_have_equal_digests_of_32_bytes() -> None:
    assert replace(BASE).digest == BASE.digest and len(BASE.digest) == 32


NAMED = st.lists(
    st.tuples(st.text(max_size=4), st.one_of(st.integers(-9, 99), st.text(max_size=4))), max_size=4
)


@given(NAMED, NAMED)
def test_different_fields_never_spell_the_same_bytes(
    one: list[tuple[str, int | str]], other: list[tuple[str, int | str]]
) -> None:
    typed = [[(name, type(value), value) for name, value in flat] for flat in (one, other)]
    same = digest_fields("d", one) == digest_fields("d", other)
    assert same == (typed[0] == typed[1])


def test_a_number_and_its_spelling_differ() -> None:
    assert digest_fields("d", [("a", 1)]) != digest_fields("d", [("a", "1")])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_the_layout_knows_shape_and_bytes(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    assert layout.shape == (3, 2, 5, 16, 7)
    width = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}[dtype]
    assert layout.nbytes == 3 * 2 * 5 * 16 * 7 * width


@pytest.mark.parametrize("name", ["layers", "kv_heads", "block_size", "head_dim"])
def test_a_layout_with_a_side_that_is_not_positive_is_refused(name: str) -> None:
    zero: dict[str, Any] = {name: 0}
    with pytest.raises(KvtierError, match=f"layout.{name}: 0 is not positive"):
        replace(LAYOUT, **zero)


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(KvtierError, match="'int4' is unknown; use one of float32"):
        replace(LAYOUT, dtype="int4")
