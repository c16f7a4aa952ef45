"""Words after `evenflow` that it does not take: one line, exit status 2, for every command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import evenflow, write_inputs


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)


COMMANDS = ["simulate", "compare", "sweep", "capacity", "tune", "figures", "run", "serve"]
COMMANDS += ["replay", "validate", "schedulers", "profile", "profile import", "profile check"]
COMMANDS += [f"traces {name}" for name in ("info", "fit", "convert", "predict")]
WITHOUT_ARGUMENTS = {"figures", "schedulers", "profile"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        *(
            (f"{name} --xyzzy", f"No such option: --xyzzy (evenflow {name} --help)")
            for name in COMMANDS
        ),
        *(
            (name, f"(evenflow {name} --help)")
            for name in COMMANDS
            if name not in WITHOUT_ARGUMENTS
        ),
        ("--xyzzy", "No such option: --xyzzy (evenflow --help)"),
        ("simulat", "No such command 'simulat'. Did you mean 'simulate'? (evenflow --help)"),
        ("traces inf", "No such command 'inf'. Did you mean 'info'? (evenflow traces --help)"),
        ("simulate RUN.yaml b.yaml", "unexpected extra argument"),
        ("simulate RUN.yaml --save some", "'some' is not one of 'summary', 'requests', 'all'"),
        ("simulate RUN.yaml --set", "Option '--set' requires an argument"),
        ("validate RUN.yaml --runs 0", "'--runs': Input should be greater than or equal to 1"),
        ("serve RUN.yaml --port 70000", "'--port': Input should be less than or equal to 65535"),
        ("tune RUN.yaml --trials many", "'--trials': Input should be a valid integer"),
        ("traces info missing.csv", 'trace "missing.csv" is neither a file nor a bundled sample'),
        ("traces convert trace.csv --out no/such/folder.csv", "cannot write no/such/folder.csv"),
        ("traces convert trace.csv --out copy.csv --to azure", 'cannot write trace format "azure"'),
    ],
)
def test_the_command_line_itself(arguments: str, told: str) -> None:
    before = sorted(Path().rglob("*"))
    status, output, errors = evenflow(*arguments.split())
    assert (status, output) == (2, "")
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert told in errors
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("group", ["", "traces"])
def test_no_command_at_all_shows_the_help(group: str) -> None:
    status, output, errors = evenflow(*group.split())
    assert (status, errors) == (2, "")
    assert f"Usage: evenflow {group}" in output
