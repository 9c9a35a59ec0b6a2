from __future__ import annotations

from loadtest.options import blas_summary, key_value, merged


def test_values_are_json_or_else_text() -> None:
    assert key_value("a=1") == ("a", 1)
    assert key_value("a=null") == ("a", None)
    assert key_value('a={"b": [1]}') == ("a", {"b": [1]})
    assert key_value("a=paged") == ("a", "paged")
    assert key_value("a=b=c") == ("a", "b=c")
    assert merged([("a", 1), ("b", 2), ("a", 3)]) == {"a": 3, "b": 2}
    assert merged(None) == {}


def test_results_carry_no_folder_of_the_machine() -> None:
    status = {
        "active": True,
        "library": "/somewhere/site-packages/x/libopenblas.so.0",
        "num_threads": 2,
        "message": "m",
    }
    assert blas_summary(status) == {"active": True, "library": "x/libopenblas.so.0", "num_threads": 2}
    assert blas_summary({"active": False, "library": None, "num_threads": None})["library"] is None
