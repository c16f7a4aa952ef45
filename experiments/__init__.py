"""Experiments: the command line, studies and figures, over one simulator and one runtime.

Its packages have plain names. Another `sim` or `traces` (of another distribution, or beside a
notebook) that Python finds first would be taken for ours: it is told here, before it is imported. A
mere folder of such a name, with data in it, is in nobody's way: a package on the path goes first.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent


def _stranger() -> str | None:
    """Return which package is not the one that lies beside this one, and where it is."""
    for name in ("evenflow", "traces", "profiler", "sim", "runtime"):
        spec = find_spec(name)
        places = [] if spec is None else spec.submodule_search_locations or [spec.origin or name]
        if [Path(place).resolve() for place in places] != [HOME / name]:
            return f"{name}: Python finds {', '.join(places) or 'nothing'}, not evenflow's package"
    return None


if str(HOME) not in sys.path:
    sys.path.append(str(HOME))
if stranger := _stranger():
    message = f"{stranger}; rename what is in the way, or work in another folder"
    if sys.argv[:1] == ["-m"]:  # a command: python -m experiments.cli
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(message)
