"""Inputs of the functions of `import evenflow as ef`: runs, changes and policies.

Knows the forms in which Python and the command line give them; answers no question.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenflow import options as given
from evenflow.errors import UsageError
from evenflow.options import AnyProcess, Changes, Names, Policy

if TYPE_CHECKING:
    from evenflow.config.yaml_file import Document
    from evenflow.study.runs import GivenPolicy, Job


def by_name(keys: Any) -> Any:
    """Return keys with policies as plain data: their names, and the parameters of objects."""
    if isinstance(keys, Mapping):
        return {key: by_name(value) for key, value in keys.items()}
    if isinstance(keys, list):
        return [by_name(value) for value in keys]
    if callable(getattr(keys, "schedule", None)):
        return _policy_by_name(keys)
    return keys


def _policy_by_name(policy: Any) -> str | dict[str, Any]:
    """Return what other processes make a policy of; UsageError where they cannot."""
    from evenflow.schedulers import parameters

    cls = policy if isinstance(policy, type) else type(policy)
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise UsageError(
            f"scheduler {cls.__name__}: is of a notebook, a script or a function; what other "
            "processes import is right: a class of a module, or FILE.py:Class"
        )
    name, given = f"{cls.__module__}:{cls.__qualname__}", {}
    if policy is cls:
        return name
    for key, parameter in parameters(cls).items():
        value = getattr(policy, key, policy)
        if value is policy or not isinstance(value, bool | int | float | str | list | dict | None):
            raise UsageError(
                f"scheduler {cls.__name__}: other processes make it anew, and its parameter {key} "
                f'is no attribute of plain data; {{"name": "{name}", "{key}": ...}} is right'
            )
        if value != parameter.default:
            given[key] = value
    return {"name": name, **given}


def window_of(asked: tuple[float, float] | str | None) -> tuple[float, float] | None:
    """Return the seconds of a run that `A..B` names."""
    if asked is None:
        return None
    try:
        first, last = map(float, asked.split("..") if isinstance(asked, str) else asked)
    except (TypeError, ValueError):
        first, last = 1.0, 0.0
    if not 0 <= first <= last:
        right = "give the seconds A..B, such as 10..12.5 or 0..inf"
        raise UsageError(f"--window: {right}: not {asked}")
    return first, last


def texts_of(changes: Changes) -> list[str]:
    """Return changes of keys as texts for `--set`."""
    if not isinstance(changes, Mapping):
        return list(changes or ())
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]


def gpu_counts(gpus: int | str | Sequence[int]) -> str:
    return ",".join(map(str, gpus)) if isinstance(gpus, list) else str(gpus)


def names_in(given: Names) -> list[str]:
    """Return the names of a list, or of a text that parts them by commas."""
    parts = given.split(",") if isinstance(given, str) else given
    return [name.strip() for name in parts if name.strip()]


def job_of(
    run: given.RunFile,
    scheduler: Policy | None,
    changes: Changes,
    pipeline: str | None,
    processes: Sequence[AnyProcess] | None,
) -> tuple["Job", Path]:
    """Return the job of a changed run, with another policy and processes where given."""
    from evenflow.config.build import load_workload
    from evenflow.config.run import configured
    from evenflow.study.runs import GivenPolicy, Job, given_process

    document, file = document_of(run)
    entry = None if scheduler is None else policy_of(scheduler)
    patched = changed(document, changes, entry)
    joining = list(map(given_process, processes or ()))
    more = {"pipeline": pipeline, "processes": [entry for entry, _ in joining]}
    config = configured(changed(patched, {key: each for key, each in more.items() if each}))
    policy = entry if isinstance(entry, GivenPolicy) else None
    functions = tuple(function for _, function in joining)
    workload = load_workload(config, file.parent)
    return Job(config, workload, file.parent, policy, processes=functions), file


def document_of(run: given.RunFile, changes: Changes = None) -> tuple["Document", Path]:
    """Return a run's changed keys, and its file; relative paths start from the file's folder."""
    from evenflow.config.run import RunConfig
    from evenflow.config.yaml_file import Document, read

    file = Path("the run")
    if isinstance(run, RunConfig):
        document = run.document()
    elif isinstance(run, Mapping):
        document = Document("the run", dict(run), {})
    else:
        file = Path(run)
        document = read(file)
    return changed(document, changes), file


def changed(document: "Document", changes: Changes, policy: object = None) -> "Document":
    """Return a run's keys with another policy, then with new values."""
    from evenflow.config.yaml_file import overridden, patched

    if policy is not None:
        document = patched(document, {"scheduler": getattr(policy, "name", policy)})
    if isinstance(changes, Mapping):
        return patched(document, changes)
    return overridden(document, changes or ())


def policies_of(schedulers: Sequence[Policy] | Mapping[str, Policy] | str) -> list[Any]:
    """Return the entries of a comparison, named where a mapping names them."""
    from evenflow.study.compare import Named, parse_schedulers

    if isinstance(schedulers, str):
        return parse_schedulers(schedulers)
    if isinstance(schedulers, Mapping):
        return [Named(str(label), policy_of(policy)) for label, policy in schedulers.items()]
    return list(map(policy_of, schedulers))


def policy_of(policy: Policy) -> "str | dict[str, Any] | GivenPolicy":
    from evenflow.study.runs import GivenPolicy

    if isinstance(policy, Mapping):
        return dict(policy)
    return policy if isinstance(policy, str) else GivenPolicy(policy)
