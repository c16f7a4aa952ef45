"""The keys of RUN.yaml and SWEEP.yaml as a JSON schema and as tables, from the classes that check.

A key's description is the text below it in its class; of a policy's parameter, it is here.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from evenflow.compiled import docstring
from evenflow.keys import Keys
from evenflow.schedulers import POLICIES, parameters, policy
from evenflow.schedulers.limits import declared
from evenflow.specs.gpu import GpuSpec, gpus, links
from evenflow.specs.model import models
from experiments.run_file.pools import POOLED

Json = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"

PARAMETERS = {
    "max_num_seqs": "Most requests that are admitted at a time.",
    "max_num_batched_tokens": "Most tokens of a micro-batch; null: `max_model_len`.",
    "max_batch_rows": "Most rows of a micro-batch: decodes, and chunks of prompts; null: no limit.",
    "max_model_len": "Most tokens of a request; null: the run's.",
    "watermark": "The share of the pages that an admission leaves free.",
    "padded": "Whether each request costs as much as the longest of its batch.",
    "async_scheduling": "Which model runner schedules a decode again before its last token is "
    "there; v1 does so on one stage only.",
    "scheduling_policy": "Who is first, and preempted last: who came first, or has the lowest "
    "`priority`.",
    "token_budget": "Most tokens of a micro-batch that has chunks; auto: most that keep "
    "`tbt_slo_s`.",
    "tbt_slo_s": "Seconds between tokens that `token_budget: auto` keeps by the cost model.",
    "mode": "Chunks beside decodes; chunks and decodes in turns; or whole prompts beside decodes.",
    "share": "What of a micro-batch is shared out over the stages: the requests that may "
    "be admitted, the decodes, or all tokens.",
    "chunked_prefill_size": "Most prompt tokens of a micro-batch; longer prompts are cut.",
    "max_prefill_tokens": "Most prompt tokens that are admitted in a micro-batch.",
    "max_running_requests": "Most requests that are admitted at a time.",
    "pp_max_micro_batch_size": "Most requests of a slot; null: an even part of "
    "`max_running_requests`.",
    "schedule_conservativeness": "How much of the output that clients allow is kept free for the "
    "running decodes: 0.7 times this ratio at first, less with each step.",
    "schedule_policy": "Who is first: who came first, or has the longest prefix in the cache.",
    "mixed_chunk": "Whether decodes go beside chunks of prompts.",
    "dynamic_chunking": "Whether chunks get shorter as a prompt's context grows.",
    "prefill_decode_interval": "Micro-batches that admit nobody after one of prompts.",
    "scheduler_recv_interval": "Steps of decodes after which requests that came are seen.",
    "overlap": "Whether a batch is chosen before the last one's outputs are there; null: on one "
    "stage.",
    "iterations": "#T: micro-batches over which the waiting prompt tokens are spread.",
    "max_prefill": "MaxP: most prompt tokens of a micro-batch.",
    "min_prefill": "MinP: fewest prompt tokens of a micro-batch, if so many wait.",
    "kv_thresh": "KVthresh: the share of free pages below which no prompt is computed.",
    "use_wt": "Whether waiting tokens throttle prefill (WT), over `iterations` micro-batches.",
    "use_ut": "Whether the use of the pages throttles prefill (UT).",
    "coupled": "Whether prompts and decodes share one budget of `max_prefill` (CK).",
    "victim": "Who is preempted: the decode that returned last, or has most pages.",
    "reserve": "Pages kept for decodes: `kv_thresh` of all, or what they are expected to need.",
    "variant": "`paper`: as printed; `code`: as the authors' package; `reading`: the paper with "
    "the package's integer rules.",
    "predictor": "Who foretells output lengths: oracle, mean, {kind: noisy, accuracy}, or {kind: "
    "classifier, path}.",
    "future_points": "Decode steps from now at which the predicted use of the pages has to fit; "
    "null: 32, 64, ... 1024.",
    "work_stealing": "Whether decode batches are evened out as they return.",
    "kv_occupancy_ratio": "The share of the pages in use that ends prefill; null: the prediction.",
    "request_finish_ratio": "The share of its requests that have ended which ends decode; null: "
    "the intensities.",
}
"""What the parameters of the policies mean, by the names they have in engines and papers."""


@cache
def below_keys(cls: type) -> dict[str, str]:
    """Return the text below each key in a class and in those that it extends."""
    found: dict[str, str] = {}
    for each in reversed([each for each in cls.__mro__ if issubclass(each, Keys | GpuSpec)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        assert isinstance(body, ast.ClassDef)
        for key, text in zip(body.body, body.body[1:], strict=False):
            match key, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ):
                    found[name] = one_line(words)
    return found


def one_line(text: str) -> str:
    """Return a text with its lines joined."""
    return " ".join(text.split())


def first_sentence(docstring: str | None) -> str:
    """Return what a class is, which its docstring begins with."""
    return one_line((docstring or "").split("\n\n")[0])


class _Described(GenerateJsonSchema):
    """Pydantic's schema, in which each key has its description and no title."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> Json:
        """Add the bare word of a short form; and what `expect` asks for, in words."""
        made = super().function_before_schema(schema)
        check = schema["function"]["function"]
        if "short_form" in check.__qualname__:
            return {"anyOf": [{"type": "string"}, made]}
        words = inspect.getclosurevars(check).nonlocals.get("expected")
        return made | {"$comment": words} if words else made

    def model_schema(self, schema: core_schema.ModelSchema) -> Json:
        return _described(super().model_schema(schema), schema["cls"])

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> Json:
        return _described(super().dataclass_schema(schema), schema["cls"])


def _described(made: Json, cls: type) -> Json:
    about = first_sentence(cls.__doc__)
    below = below_keys(cls) | {"kind": about}
    for name, each in made.get("properties", {}).items():
        text = below.get(name) or PARAMETERS.get(name, "")
        made["properties"][name] = {"description": text, **each}
    return made | {"description": about}


def _keys_of(top: Any) -> Json:
    return TypeAdapter(top).json_schema(schema_generator=_Described)


def schema(top: type[BaseModel]) -> Json:
    """Return the JSON schema of a file whose keys are those of `top`."""
    whole = _keys_of(top)
    known = whole.pop("$defs")
    if "SchedulerConfig" in known:
        known |= _policies()
        known["GpuSpec"] = _keys_of(GpuSpec) | {"additionalProperties": False}
        del known["GpuSpec"]["required"]  # what is not given is that of the GPU of this name
    for each in (whole, *known.values()):
        for key, value in each.get("properties", {}).items():
            each["properties"][key] = _as_written(key, value, known)
    return {"$schema": DIALECT, **whole, "$defs": known}


def _policies() -> Json:
    """Return what a scheduler may be, each policy with its parameters."""
    known: Json = {}
    for name in (*POLICIES, *POOLED):
        made = _keys_of(POOLED[name] if name in POOLED else _parameters_of(name))
        known |= made.pop("$defs", {})
        known[name] = _named(made, name)
    references = [{"$ref": f"#/$defs/{name}"} for name in (*POLICIES, *POOLED)]
    return known | {"SchedulerConfig": {"anyOf": [*references, OWN_POLICY]}}


OWN_POLICY: Json = {
    "description": "A policy of your own, and the parameters of its constructor.",
    "properties": {"name": {"description": "module:Class", "pattern": ":", "type": "string"}},
    "required": ["name"],
    "type": "object",
}


def _parameters_of(name: str) -> type[BaseModel]:
    """Return a policy's parameters, as it declares them, as a class."""
    cls = policy(name)
    types = declared(cls)
    keys: Any = {key: (types[key], each.default) for key, each in parameters(cls).items()}
    made: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **keys)
    made.__doc__ = docstring(cls)
    return made


def _named(made: Json, name: str) -> Json:
    key = {"name": {"description": made["description"], "const": name, "type": "string"}}
    return made | {
        "title": name,
        "properties": {**key, **made["properties"]},
        "required": ["name", *made.get("required", ())],
    }


def _as_written(key: str, value: Json, known: Json) -> Json:
    """Return a key's schema with the bare words and the GPU's keys that a file may have there."""
    about = {name: value[name] for name in ("description", "default", "$comment") if name in value}
    rest = {name: value[name] for name in value if name not in about}
    choices = rest.get("anyOf") or [rest]
    choices = [inner for each in choices for inner in each.get("oneOf", [each])]
    if key == "gpu":
        choices = [_GPU if each.get("type") == "object" else each for each in choices]
    words = _words(choices, known)
    choices = [each | words if each == {"type": "string"} else each for each in choices]
    names = {"examples": _names()[key]} if key in _names() else {}
    choices = [each | names if each.get("type") == "string" else each for each in choices]
    return about | (choices[0] if len(choices) == 1 else {"anyOf": choices})


_GPU = {"$ref": "#/$defs/GpuSpec"}


def _words(choices: list[Json], known: Json) -> Json:
    """Return which bare words stand for one of some mappings: those whose kind says all."""
    named = [known[each["$ref"].rpartition("/")[2]] for each in choices if "$ref" in each]
    alone = [
        each.get("properties", {}) for each in named if set(each.get("required", ())) <= {"kind"}
    ]
    words = [keys["kind"]["const"] for keys in alone if "kind" in keys]
    return {"enum": words} if words else {}


@cache
def _names() -> dict[str, list[str]]:
    """Return the names that the tables have, for keys whose values are looked up there."""
    of_links = [each.name for each in links()]
    return {
        "model": list(models()),
        "gpu": [each.name for each in gpus()],
        "scheduler": [*POLICIES, *POOLED],
        **dict.fromkeys(("link", "all_reduce", "transfer_link"), of_links),
    }
