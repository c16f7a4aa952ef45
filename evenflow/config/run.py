"""RUN.yaml: its keys, their types, limits and defaults; reading it, and changing some of its keys.

It knows no model, policy or trace by name: `evenflow.config.build` looks those up.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Discriminator, Field, PrivateAttr, Tag, model_validator

from evenflow.config import links, parts, yaml_file
from evenflow.config.costs import MEASURED_COSTS, Costs, RooflineCosts, SpeculativeConfig
from evenflow.config.nccl import with_points
from evenflow.config.workers import EmulatedWorkers, Workers
from evenflow.config.workload import WorkloadConfig
from evenflow.costs import Fabric
from evenflow.engines import sglang_server
from evenflow.errors import MOST, UsageError, is_count
from evenflow.keys import (
    MOST_INSTANCES,
    MOST_MODEL_LEN,
    Count,
    Instances,
    Keys,
    NameOr,
    Positive,
    expect,
    needed,
    remedy,
)
from evenflow.results.metrics import Limit
from evenflow.runtimes import RuntimeName, RuntimeOverheads, runtimes
from evenflow.specs.gpu import GIB, GpuSpec, gpu
from evenflow.specs.memory import MemoryName, memories

InMilliseconds = Annotated[
    Limit, expect(lambda v: v in get_args(Limit), f"{', '.join(get_args(Limit))}, in milliseconds")
]


KINDS = {dict: "mapping", list: "list"}

Gpu = Annotated[
    Annotated[str, Tag("name")]
    | Annotated[dict[str, Any], Tag("mapping")]
    | Annotated[list[NameOr[str, dict[str, Any]]], Tag("list")],
    Discriminator(lambda value: KINDS.get(type(value), "name")),
]
"""A GPU by its name or as a mapping, or one for each stage."""

Dtype = Literal[
    "bfloat16",
    "float16",
    "fp8",
    "fp8_block",
    "fp8_wo",
    "mxfp8",
    "int8",
    "int8_wo",
    "int4_wo",
    "int4_wo_32",
    "nvfp4",
    "nvfp4_wo",
    "mxfp4",
    "mxfp4_wo",
]


class RunConfig(Keys):
    """One run: a deployment, a scheduler, a workload."""

    _unchosen: Collection[str] = PrivateAttr(())
    model: str | None = Field(default=None, min_length=1, examples=["Llama-3.1-8B"])
    """A name of `evenflow models`, or the path of a Hugging Face config.json."""
    dtype: Dtype | None = None
    """What the layers' matrices are in (quantization); null: as the model has them, but 16 bits for
    float32, or for none, where a `gpu` is named.
    """
    kv_dtype: Literal["bfloat16", "float16", "fp8"] | None = None
    """What keys and values are in (kv_cache_dtype); null: as the model has them."""
    gpu: Gpu | None = Field(default=None, examples=["H100"])
    """A name of `evenflow gpus`, or a mapping with what differs from one; or a list, one for each
    stage.
    """
    stages: Annotated[
        int | list[int],
        expect(
            lambda v: (
                is_count(v, MOST_INSTANCES)
                or (isinstance(v, list) and 0 < len(v) <= MOST_INSTANCES and all(map(is_count, v)))
            ),
            f"a whole number of at least 1 and at most {MOST_INSTANCES}, "
            "or a list of layers per stage",
        ),
    ] = Field(examples=[4])
    """Pipeline stages (pipeline_parallel_size, pp), or a list of the layers of each."""
    split: Literal["even", "balanced"] = "even"
    """How layers are divided where `stages` is a number: evenly, or so that the stages take the
    same time.
    """
    tensor_parallel: Count = 1
    """GPUs of each stage (tensor_parallel_size, tp)."""
    data_parallel: Instances = 1
    """Groups of `tensor_parallel` GPUs of each stage (data_parallel_size, dp), with separate
    requests; they step together, and a model's experts are over all of them.
    """
    attention_dp_config: parts.AttentionDpConfig | None = None
    """How prompts of one group of `data_parallel` wait for the others'; null: they do not."""
    expert_parallel: bool = False
    """Whether the GPUs of a stage divide a model's experts instead of splitting each
    (enable_expert_parallel, ep)."""
    link: links.NameOrLink | None = None
    """Between neighbouring stages, and between the GPUs of each (`costs.all_reduce` replaces it
    there): a name of `evenflow links`, or a mapping; null: that of the machine.
    """
    nodes: links.NodesConfig | None = None
    """Machines, where GPUs are in several; null: one machine where `link` is given, else `machine`.
    """
    machine: links.NameOrMachine | None = None
    """What connects the GPUs where `link`, `nodes` and `costs.all_reduce` do not say it: a name of
    `evenflow machines`, or a mapping; null: the machine that is sold with the GPU.
    """
    costs: Costs = RooflineCosts(kind="roofline")
    """How long a micro-batch takes on a stage."""
    kv: parts.KvConfig = parts.KvConfig()
    """The memory for keys and values."""
    runtime: NameOr[RuntimeName, parts.RuntimeConfig] | None = None
    """CPU time around a micro-batch: that of a named engine, none (`ideal`), what the `cpu_*`
    points of a profile say (`profile`), or seconds of your own; null: `profile` with `costs:
    profile`; on a GPU that of the engine whose policy it is: `vllm-0.19` for `vllm_v1`, `vllm-0.12`
    where its decodes do not run ahead, `trtllm-1.2` or `1.0` for `trtllm`, `sglang-0.5` for
    `sglang`; else `ideal`; commands that compare policies take one for all.
    """
    enforce_eager: bool = False
    """Whether every kernel is launched by itself, without CUDA graphs (vLLM's --enforce-eager),
    `runtime.launch_s` apart, or 28 us where the runtime says none.
    """
    scale: parts.ScaleConfig = parts.ScaleConfig()
    """Factors on predicted seconds."""
    workers: Workers = EmulatedWorkers(kind="emulated")
    """What computes in `evenflow run` and `serve`; a simulation has no workers."""
    dispatch: Literal["stage0", "eager", "engine_loop"] | None = None
    """When the policy is asked for a micro-batch: when stage 0 can take one, whenever the cap
    allows (`eager`), or in turns with waiting for one that is done (`engine_loop`); null:
    `engine_loop` for a policy that goes with nothing else, `stage0` for all others.
    """
    max_in_flight: Annotated[
        int | Literal["unlimited"] | None,
        expect(
            lambda v: v in (None, "unlimited") or is_count(v),
            "null (the number of stages), unlimited, or a whole number of at least 1 and at most "
            f"{MOST}",
        ),
    ] = None
    """Micro-batches that may be under way at a time; null: the number of stages."""
    virtual_engines: Annotated[
        bool | int,
        expect(
            lambda v: isinstance(v, bool) or is_count(v, MOST_INSTANCES),
            f"true, false, or a number of engines of at least 1 and at most {MOST_INSTANCES}",
        ),
    ] = False
    """Separate policies that share the pages evenly, one micro-batch in flight each (vLLM V0);
    true: one a stage.
    """
    pipelined_chunks: bool | None = None
    """Whether a prompt's next chunk may follow before the last one is done; null: what the policy
    says.
    """
    max_model_len: Annotated[int, Field(ge=1, le=MOST_MODEL_LEN)] | None = None
    """Most tokens of a request, prompt and output; null: the model's, or what the pages hold."""
    goodput: dict[InMilliseconds, Positive] | None = None
    """Limits in milliseconds that a request must keep to count in `request_goodput`: `{ttft: 2000,
    tpot: 100}`.
    """
    speculative: SpeculativeConfig | None = None
    """Speculative decoding; null: none."""
    pipeline: Literal["recurrence", "processes"] | None = None
    """How micro-batches cross the stages in a simulation: times computed when they are sent, or a
    SimPy process for each stage and link; null: `recurrence`, unless something needs processes.
    """
    processes: list[parts.NamedProcess] | None = None
    """SimPy processes that join a simulation, each `module:function` or a mapping of its `name` and
    parameters (docs/processes.md); null: none.
    """
    replicas: parts.ReplicasConfig | None = None
    """Several pipelines side by side; null: one."""
    scheduler: parts.Policy = Field(examples=["sarathi"])
    """The policy (policy, engine) and its parameters: a name of `evenflow schedulers`, or
    module:Class.
    """
    workload: WorkloadConfig = Field(examples=[{"trace": "azure-conv-sample"}])
    """Which requests come, and when."""

    @classmethod
    def place_of(cls, word: str) -> str | None:
        """Return the place of a parameter of some policy."""
        from evenflow.schedulers import POLICIES, parameters, policy

        known = any(word in parameters(policy(name)) for name in POLICIES)
        return f"scheduler.{word}" if known else None

    @model_validator(mode="after")
    def _what_needs_what(self) -> Self:
        draft = None if self.speculative is None else self.speculative.draft_model
        needs = (
            (f"costs.kind: {self.costs.kind}", True, self.costs.NEEDS),
            ("costs.fill", getattr(self.costs, "fill", None) is not None, ("gpu",)),
            ("kv.pages: auto", self.kv.pages == "auto", ("model", "gpu")),
            ("dtype", self.dtype is not None, ("model",)),
            ("kv_dtype", self.kv_dtype is not None, ("model",)),
            ("link", self.link is not None, ("model",)),
            ("nodes", self.nodes is not None, ("model",)),
            ("machine", self.machine is not None, ("model",)),
            ("enforce_eager", self.enforce_eager, ("model", "gpu")),
            ("split: balanced", self.split == "balanced", ("model", "gpu")),
            ("expert_parallel", self.expert_parallel, ("model", "gpu")),
            ("data_parallel", self.data_parallel > 1, ("model", "gpu")),
            ("speculative.draft_model", draft is not None, ("model", "gpu")),
            ("kv.swap", self.kv.swap, ("model",)),
            (f"workers.kind: {self.workers.kind}", self.workers.kind != "emulated", ("model",)),
        )
        unmet = [
            (reason, f'"{key}"')
            for reason, applies, keys in needs
            for key in keys
            if applies and getattr(self, key) is None
        ]
        measured, groups = self.costs.kind == "profile", self.data_parallel
        asks_for_turns, earlier = self.attention_dp_config is not None, bool(self.workload.after)
        others = (
            (
                "runtime: profile",
                self.runtime == "profile" and not measured,
                '"costs.kind: profile"',
            ),
            ("workload.after", earlier and not self.kv.prefix_cache, '"kv.prefix_cache: true"'),
            ("data_parallel", groups > 1 and self.virtual_engines, '"virtual_engines: false"'),
            ("attention_dp_config", asks_for_turns and groups == 1, '"data_parallel" of 2 or more'),
            (
                f"a pipeline of {self.num_stages} stages",
                isinstance(self.gpu, list) and len(self.gpu) != self.num_stages,
                f'"gpu" with one GPU, or with a list of {self.num_stages}',
            ),
        )
        unmet += [(reason, key) for reason, lacks, key in others if lacks]
        for reason, key in unmet:
            raise needed(reason, key, remedy(type(self), key.strip('"')))
        return self

    @property
    def memory(self) -> MemoryName:
        """The engine that pages are counted as: as given, else the policy's."""
        return self.kv.like or parts.MEMORY_OF.get(self.scheduler.name, "plain")

    @property
    def memory_utilization(self) -> float:
        """The share of each GPU's memory that is used: as given, else as that engine has it."""
        if self.kv.memory_utilization is not None:
            return self.kv.memory_utilization
        engine = memories().get(self.memory)
        if engine is not None and engine.share_of == "free" and self.gpus:
            return sglang_server.mem_fraction_static(
                self.gpus[0].visible_bytes / GIB,
                self.scheduler.params,
                self.tensor_parallel,
                self.num_stages,
                self.data_parallel,
                eager=self.enforce_eager,
            )
        return 0.9 if engine is None else engine.utilization

    @property
    def has_engine_share(self) -> bool:
        """Whether that share is an engine's own, as none is given."""
        return self.kv.memory_utilization is None and self.memory != "plain"

    @property
    def cpu_time(self) -> RuntimeName | parts.RuntimeConfig:
        """The CPU time that is charged: as given, else measured, else the policy's engine's."""
        if self.runtime is not None:
            return self.runtime
        if self.costs.kind in ("profile", "affine"):
            return "profile" if self.costs.kind == "profile" else "ideal"
        return parts.runtime_of(self.scheduler, in_step=self.in_step)

    @property
    def limits(self) -> dict[str, int]:
        """The policy's parameters that are left out, and that its engine sets by the card."""
        return parts.limits_of(self.scheduler, self.gpus)

    @property
    def params(self) -> dict[str, Any]:
        """The policy's parameters as given, with its engine's limits."""
        return {**self.limits, **self.scheduler.params}

    @property
    def num_stages(self) -> int:
        return self.stages if isinstance(self.stages, int) else len(self.stages)

    @property
    def gpus(self) -> tuple[GpuSpec, ...]:
        """The GPU of each stage, none where the run names none; UsageError if one is unknown."""
        given = self.gpu if isinstance(self.gpu, list) else [self.gpu] * self.num_stages
        return tuple(gpu(each) for each in given if each is not None)

    @property
    def gpu_words(self) -> str:
        """The names of the GPUs, each once, in the order of the stages."""
        return " and ".join(dict.fromkeys(spec.name for spec in self.gpus)) or "GPU"

    @property
    def stage_gpus(self) -> int:
        return self.tensor_parallel * self.data_parallel

    @property
    def pipeline_gpus(self) -> int:
        """GPUs of one pipeline, of all its stages."""
        return self.num_stages * self.stage_gpus

    @property
    def num_replicas(self) -> int:
        return 1 if self.replicas is None else self.replicas.count

    def overheads(self, measured: RuntimeOverheads) -> RuntimeOverheads:
        """Return the CPU work beside the kernels: `measured`, of a named runtime, or as given."""
        named = self.cpu_time
        if named == "profile":
            charged = measured
        elif isinstance(named, str):
            charged = runtimes()[named].on(self.num_stages)
        else:
            charged = named.make(self.num_stages)
        return charged if self.scale.host == 1 else charged.scaled(self.scale.host)

    def runtime_facts(self, measured: RuntimeOverheads) -> dict[str, Any]:
        """Return the CPU time that a simulation charges and, of a named set, its source."""
        charged = self.overheads(measured)
        named = self.cpu_time
        if not isinstance(named, str):
            return asdict(charged)
        known = named != "profile"
        source = runtimes()[named].source if known else "the cpu_* points of the profile"
        return {"name": named, "source": source, **asdict(charged)}

    @property
    def in_step(self) -> bool:
        """Whether decodes have to wait for their last token, whatever a policy asks for."""
        asks_again = self.dispatch in ("stage0", "eager")
        several = self.virtual_engines is True or self.virtual_engines > 1
        is_other = self.kv.swap or self.speculative is not None or self.workers.kind != "emulated"
        return asks_again or several or is_other

    @property
    def wires(self) -> links.Wires:
        """Links between the GPUs: as given, else as in the machine, else as in the GPU's machine.

        A single stage that says how its GPUs add up says all. UsageError for what is unknown.
        """
        given = links.Wires(self.link, self.nodes, getattr(self.costs, "all_reduce", None))
        home = self.home
        if home is None:
            return given
        link, nodes, all_reduce = links.Wires.of(home, self.pipeline_gpus)
        return links.Wires(given.link or link, given.nodes or nodes, given.all_reduce or all_reduce)

    @property
    def home(self) -> str | links.MachineConfig | None:
        """The machine that connects the GPUs; None where the run's own links do."""
        all_reduce = getattr(self.costs, "all_reduce", None)
        alone = self.num_stages == 1 and (self.stage_gpus == 1 or all_reduce is not None)
        if self.machine is not None:
            return self.machine
        if self.link is not None or alone or self.gpu is None or self.costs.kind == "affine":
            return None
        machines = {spec.machine for spec in self.gpus}
        if len(machines) > 1:
            raise UsageError(
                f"gpu: {self.gpu_words} are sold in machines of their own; give the link between "
                "the stages, such as link: pcie-gen4"
            )
        return machines.pop() or None

    def fabric(self) -> Fabric | None:
        """Return what connects the GPUs of a stage; None if no link is known."""
        return self.wires.fabric(self.stage_gpus)

    def setup(self) -> str:
        """Return a line: what is simulated on what, with "(default)" after what was not chosen."""
        return f"simulated: {', '.join(self.setup_parts())}"

    def setup_parts(self) -> list[str]:
        """Return the parts of that line: model and GPUs, layout, what joins them, costs."""
        named = self.cpu_time if isinstance(self.cpu_time, str) else "as given"
        is_default = self.runtime is None or "runtime" in self._unchosen
        return self._parts(named + (" (default)" if is_default else ""))

    def with_defaults(self, unchosen: Collection[str]) -> Self:
        """Return the run; its set-up line says "(default)" after these keys of `engine_of_all`."""
        found = self.model_copy()
        found._unchosen = unchosen
        return found

    def real_setup(self) -> str:
        """Return a line: what is served by which workers, "(default)" after what was not chosen."""
        return f"{self.workers.words}: {', '.join(self._parts('of this machine'))}"

    def _parts(self, cpu_time: str) -> list[str]:
        ranks, copies = self.tensor_parallel, self.num_replicas
        counts = Counter(spec.name for spec in self.gpus) or {"GPU": self.num_stages}
        gpus = copies * self.stage_gpus
        devices = " + ".join(f"{count * gpus} x {name}" for name, count in counts.items())
        layout = [f"PP{self.num_stages}", *([f"TP{ranks}"] if ranks > 1 else [])]
        layout += [f"DP{self.data_parallel}"] if self.data_parallel > 1 else []
        layout += [f"EP{self.stage_gpus}"] if self.expert_parallel else []
        layout += [f"{copies} replicas"] if copies > 1 else []
        words = [f"{self.model or 'no model'} on {devices}", " x ".join(layout)]
        words += [*self._wires_in_words()] if self.pipeline_gpus > 1 else []
        words.append(f"CPU time {cpu_time}")
        limits = " and ".join(f"{key} {value}" for key, value in self.limits.items())
        words += [f"{limits} (default)"] if limits else []
        if self.has_engine_share and self.kv.pages == "auto":
            words += [f"memory_utilization {self.memory_utilization:g} (default)"]
        return [*words, f"costs {self.costs.kind}{self._default('costs')}"]

    def _wires_in_words(self) -> Iterator[str]:
        link, nodes, all_reduce = self.wires
        if self.home is not None:
            name = self.home if isinstance(self.home, str) else self.home.name or "as given"
            yield f"machine {name}{self._default('machine')}"
        if link is not None:
            yield f"link {links.link_words(link)}"
            if nodes is not None:
                yield f"{links.link_words(nodes.link)} between nodes of {nodes.gpus}"
        elif self.num_stages > 1:
            yield f"{self.unnamed_links} (default)"
        if self.stage_gpus > 1 and self.costs.kind in ("roofline", *MEASURED_COSTS):
            given = getattr(self.costs, "all_reduce", None)
            over = all_reduce or self.wires.reduced
            words = "over the same" if over == link else links.link_words(over or "") or "as given"
            measured = given is None and self.costs.kind in MEASURED_COSTS
            default = " (default)" if given is None else ""
            yield f"all-reduce {'as measured' if measured else words}{default}"

    @property
    def unnamed_links(self) -> str:
        """The links between stages in words, where the run names none."""
        if self.costs.kind == "profile":
            return "links as the profile has them, of no time where it has none"
        return "links that take no time"

    def _default(self, key: str) -> str:
        return "" if key in self.model_fields_set else " (default)"

    def resolved(self) -> dict[str, Any]:
        """Return every key with its value, defaults included, as plain data."""
        found = self.model_dump(mode="json")
        found["kv"]["memory_utilization"] = self.memory_utilization
        return found

    def document(self, name: str = "the run") -> yaml_file.Document:
        """Return the keys as a RUN.yaml of this name would hold them; what is left out stays so."""
        given = self.model_dump(exclude_unset=True) | {"scheduler": self.scheduler.written}
        if self.processes:
            given["processes"] = [process.written for process in self.processes]
        return yaml_file.Document(name, given, {})

    def digest(self) -> str:
        """Return the SHA-256 of the resolved configuration, as hexadecimal digits."""
        text = json.dumps(self.resolved(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check RUN.yaml, with `dotted.key=value` overrides applied first.

    Raises UsageError naming the file, the line, the key, and what would be right.
    """
    return configured(yaml_file.read(Path(path)), overrides)


def configured(document: yaml_file.Document, overrides: Sequence[str] = ()) -> RunConfig:
    """Check a document of RUN.yaml's keys, with `dotted.key=value` overrides applied first.

    Raises UsageError naming the file, the line, the key, and what would be right.
    """
    return yaml_file.checked(RunConfig, with_points(yaml_file.overridden(document, overrides)))


def engine_of_all(configs: Sequence[RunConfig]) -> yaml_file.Patch:
    """Return the patch with which all compared runs count pages and CPU time as one engine.

    It has a key where the runs that leave it out would differ.
    """
    pages = {str(each.memory) for each in configs if each.kv.pages == "auto" and not each.kv.like}
    times = {str(each.cpu_time) for each in configs if each.runtime is None}
    found = (("kv.like", pages, "plain"), ("runtime", times, "ideal"))
    return {key: max(of - {none}) for key, of, none in found if len(of) > 1}


def with_(
    run: RunConfig | yaml_file.Document,
    patch: yaml_file.Patch,
    places: Mapping[str, str] | None = None,
) -> RunConfig:
    """Return the run with some keys changed: `with_(run, {"workload.seed": 1})`, checked.

    Seeds, rates, a policy's parameters, another layout: each is a patch, and patches merge with
    `|`. Values replace what was below their key, outer keys first (`yaml_file.patched`).
    `yaml_file.as_patch` makes a patch of nested keys that only adds. `places` say where a key's
    value was written, for the UsageError of a key or value that cannot be.
    """
    document = run.document() if isinstance(run, RunConfig) else run
    return configured(yaml_file.patched(document, patch, places))
