"""The papers' figures and tables: one YAML each, and the claims they answer.

`gllm-12` is gllm_12.yaml: deployment, systems, sizes, what varies, what is drawn and claimed.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
NOT_FIGURES = ("claims", "misses")


def names() -> list[str]:
    """Return the names of all figures, in the order of their papers and numbers."""
    found = [p.stem for p in FOLDER.glob("*.yaml") if p.stem not in NOT_FIGURES]
    return sorted((stem.replace("_", "-") for stem in found), key=_by_number)


def _by_number(name: str) -> tuple[str, int, str]:
    paper, _, number = name.partition("-")
    digits = "".join(filter(str.isdigit, number))
    return paper, int(digits) if digits else 0, number
