"""The profile that an H200 gave, beside the roofline, which was not fitted on it."""

from __future__ import annotations

import pytest

from evenflow.costs.profile.file import read_profile
from evenflow.costs.roofline import Rates, linear_s
from evenflow.specs.gpu import gpu
from tests.places import ROOT

MEASURED = read_profile(ROOT / "examples" / "profiles" / "h200-llama-3.1-8b.csv.gz")
H200 = gpu("H200")
PRODUCTS = {
    "linear_qkv": (4096, 6144),
    "linear_o": (4096, 4096),
    "linear_up": (4096, 28672),
    "linear_down": (14336, 4096),
}


def test_a_profile_of_cuda_names_its_machine() -> None:
    header = MEASURED.header
    assert (header.device, header.device_kind) == ("NVIDIA H200", "cuda")
    assert header.dtype == "bfloat16"


@pytest.mark.parametrize("operator", PRODUCTS)
def test_large_products_take_what_the_roofline_says(operator: str) -> None:
    measured = {each.tokens: each.median_s for each in MEASURED.points if each.operator == operator}
    predicted = linear_s(4096, PRODUCTS[operator], 2, 128, Rates.of(H200))
    assert predicted == pytest.approx(measured[4096], rel=0.1)
