"""The tool of mutants names tests that exist."""

import pytest

from tools.mutants import FIRST, ROOT, THEN


@pytest.mark.parametrize("name", sorted(set(" ".join([*FIRST.values(), *THEN]).split())))
def test_a_stage_of_tests_is_a_file(name):
    assert any(ROOT.glob(f"tests/**/test_{name}.py"))
