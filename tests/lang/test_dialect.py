"""Reading SQL with sqlglot."""

from __future__ import annotations

import pytest

from fordstone.errors import NotInstalledError
from fordstone.lang.dialect import Fordstone, read


def test_compiled_parsers_of_sqlglot_are_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise TypeError("interpreted classes cannot inherit from compiled")

    monkeypatch.setattr(Fordstone, "parser_class", refuse)
    with pytest.raises(NotInstalledError, match="pip uninstall sqlglotc"):
        read("temp > 0")
