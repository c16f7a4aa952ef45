"""Costs of a micro-batch: the keys of each kind, and the cost model that it makes.

Knows specifications and cost models; no trace, no scheduler, no simulator's clock.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Discriminator, Field, model_validator

from evenflow.config.links import NameOrAllReduce
from evenflow.costs import (
    AffineCost,
    DraftedCost,
    Fabric,
    RanksCost,
    RooflineCost,
    ScaledCost,
    StageCost,
)
from evenflow.costs.modifiers import PromptsCost, StagesCost, prompts_of, share_of, step_of
from evenflow.costs.roofline import Part
from evenflow.engines.speculation import Speculation
from evenflow.errors import UsageError
from evenflow.keys import Count, Instances, Keys, NonNegative, Positive, needed, short_form
from evenflow.runtimes import RuntimeOverheads
from evenflow.specs.deployment import Deployment, split_layers
from evenflow.specs.gpu import gpus
from evenflow.specs.modelspec import ModelSpec, kv_bytes_of

if TYPE_CHECKING:
    from evenflow.costs.tables import TableCost


class Hardware(NamedTuple):
    """The model and its placement on GPUs that costs are made for, where the run names them.

    `fabric()` is what connects the GPUs of a stage, `spans_nodes` whether they are in several
    machines; `find` resolves a path.
    """

    stages: int | list[int]
    ranks: int
    spec: ModelSpec | None
    placed: Deployment | None
    fabric: Callable[[], Fabric | None]
    spans_nodes: bool
    find: Callable[[str], str]

    @property
    def depth(self) -> int:
        return self.stages if isinstance(self.stages, int) else len(self.stages)

    @property
    def model(self) -> ModelSpec:
        """The model, which the schema requires."""
        assert self.spec is not None
        return self.spec

    @property
    def deployment(self) -> Deployment:
        """The model on its GPUs, which the schema requires."""
        assert self.placed is not None
        return self.placed

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's layers on each stage."""
        if self.placed is not None:
            return self.placed.layers_per_stage
        return split_layers(self.model.num_layers, self.stages)

    def kv_bytes_per_token(self) -> list[int]:
        """Return the bytes of a token's KV on one GPU of each stage."""
        if self.placed is not None:
            return list(map(self.placed.kv_bytes_per_token, range(self.depth)))
        stages = zip(accumulate(self.layers), self.layers, strict=True)
        on = (self.model.kinds(stop - count, stop) for stop, count in stages)
        return [kv_bytes_of(kinds, self.ranks) for kinds in on]


class MadeCosts(NamedTuple):
    """A cost model; of tables, also the tables without wrappers, and their source.

    Measured with the costs, else None: `hop`, seconds and seconds a byte from stage to stage, and
    `host`, the CPU time around a micro-batch. `experts`: costs that data-parallel groups share,
    which `cost` then lacks. `prompt_scale`: factor on micro-batches with prompts.
    """

    cost: StageCost
    tables: "TableCost | None" = None
    origin: Mapping[str, Any] = MappingProxyType({})
    hop: tuple[float, float] | None = None
    host: RuntimeOverheads = RuntimeOverheads()
    experts: StageCost | None = None
    prompt_scale: float = 1.0

    def scaled(self, factor: float) -> Self:
        """Return the costs with every stage's time multiplied by `factor`."""
        if factor == 1:
            return self
        experts = None if self.experts is None else ScaledCost(self.experts, factor)
        return self._replace(cost=ScaledCost(self.cost, factor), experts=experts)

    def on_ranks(self, cost: StageCost, ranks: int) -> StageCost:
        """Return the costs of a step of `ranks` data-parallel groups; `cost` is of one group."""
        together = cost if ranks == 1 else RanksCost(cost, ranks, self.experts)
        return together if self.prompt_scale == 1 else PromptsCost(together, self.prompt_scale)

    def source(self) -> dict[str, Any]:
        """Return the origin of tables, with the share of seconds that rests on no measurement.

        That share is of the seconds predicted so far, so it is known after a run.
        """
        if self.tables is None:
            return {}
        return {**self.origin, "extrapolated_share": round(self.tables.extrapolated_share, 6)}


class AffineCosts(Keys):
    """Every stage takes `base_s + per_token_s * tokens` seconds."""

    NEEDS: ClassVar[tuple[str, ...]] = ()

    kind: Literal["affine"]
    base_s: NonNegative = Field(examples=[0.005])
    """Seconds of a micro-batch on a stage, however many tokens it has."""
    per_token_s: NonNegative = Field(examples=[2.0e-5])
    """Seconds for each of its tokens."""

    def make(self, hardware: Hardware) -> MadeCosts:
        spec = hardware.spec
        crossing = 0 if spec is None else spec.hidden_size * spec.dtype_bytes
        affine = AffineCost(self.base_s, self.per_token_s, hardware.depth, crossing)
        return MadeCosts(affine)


class RooflineCosts(Keys):
    """Operator times from peak compute and bandwidth with the GPU's efficiencies."""

    NEEDS: ClassVar[tuple[str, ...]] = ("model", "gpu")

    kind: Literal["roofline"]
    tile_tokens: Count = 128
    """Tokens that matrix products are padded to a multiple of."""
    all_reduce: NameOrAllReduce | None = None
    """The link between the tensor-parallel GPUs of a stage; null: `link`, or the machine's."""
    expert_imbalance: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """The load of the busiest expert-parallel GPU over the mean, a ratio."""

    def make(self, hardware: Hardware) -> MadeCosts:
        deployment, apart = hardware.deployment, hardware.deployment.data_parallel > 1
        if deployment.gpus:
            return self._of_unlike(deployment, hardware)
        made = MadeCosts(self._roofline(deployment, hardware, "own" if apart else "all"))
        if apart:
            made = made._replace(experts=self._roofline(deployment, hardware, "experts"))
        return made

    def _of_unlike(self, deployment: Deployment, hardware: Hardware) -> MadeCosts:
        """Return costs in which each stage takes the time of its GPU."""
        made = {
            kind: self.make(hardware._replace(placed=deployment.on(kind)))
            for kind in dict.fromkeys(deployment.gpus)
        }
        stages = [made[kind] for kind in deployment.gpus]
        experts = [each.experts for each in stages if each.experts is not None]
        return MadeCosts(
            StagesCost([each.cost for each in stages]),
            experts=StagesCost(experts) if experts else None,
        )

    def _roofline(self, deployment: Deployment, hardware: Hardware, part: Part) -> RooflineCost:
        return RooflineCost(
            deployment,
            hardware.fabric(),
            tile_tokens=self.tile_tokens,
            expert_imbalance=self.expert_imbalance,
            part=part,
        )


MEASURED_WITH = (
    "device",
    "driver",
    "libraries",
    "dtype",
    "date",
    "threads",
    "grid",
    "source",
    "checked",
)
"""What the provenance of a run says of a profile's header, in order."""


class ProfileCosts(Keys):
    """Operators measured on a device, from a file that `evenflow profile` wrote.

    Without a `link` in the run its `transfer` points, if any, are the hops between stages. Without
    a `runtime` its `cpu_*` points are the host's time.
    """

    NEEDS: ClassVar[tuple[str, ...]] = ("model",)

    kind: Literal["profile"]
    path: Annotated[str, Field(min_length=1)] = Field(examples=["profile.csv"])
    """The profile's file."""
    fill: Literal["roofline"] | None = None
    """Estimate the operators that the file lacks with the GPU's efficiencies; null: refuse it."""
    all_reduce: NameOrAllReduce | None = None
    """As of `costs: roofline`, for what is estimated."""

    def make(self, hardware: Hardware) -> MadeCosts:
        from evenflow.costs.profile.cost import (
            check_device,
            hop_of,
            host_of,
            missing_operators,
            profile_cost,
        )
        from evenflow.costs.profile.file import read_profile

        path, ranks, deployment = Path(hardware.find(self.path)), hardware.ranks, hardware.placed
        if deployment is not None and deployment.data_parallel > 1:
            raise UsageError("data_parallel: needs costs.kind: roofline or silicon")
        if deployment is not None and deployment.expert_parallel:
            raise UsageError("expert_parallel: needs costs.kind: roofline or silicon")
        profile = read_profile(path)
        if deployment is not None and deployment.gpu.name in {spec.name for spec in gpus()}:
            check_device(profile, deployment.gpu.name, str(path))
        fill = None
        if self.fill is not None:
            tile_tokens = profile.header.tile_tokens
            fill = RooflineCost(hardware.deployment, hardware.fabric(), tile_tokens=tile_tokens)
        cost = profile_cost(profile, hardware.model, hardware.layers, ranks, fill, name=str(path))
        header = asdict(profile.header)
        origin = {
            "path": self.path,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "filled_in": missing_operators(profile, hardware.model, ranks) if fill else [],
        }
        origin |= {key: header[key] for key in MEASURED_WITH}
        return MadeCosts(cost, cost, origin, hop_of(profile), host_of(profile))


class SiliconCosts(Keys):
    """Operators measured on real GPUs, from the package of the extra `silicon`."""

    NEEDS: ClassVar[tuple[str, ...]] = ("model", "gpu")

    kind: Literal["silicon"]
    framework: Literal["vllm", "sglang", "trtllm"] = "vllm"
    """The engine whose kernels were measured."""
    version: str | None = None
    """The framework's version; null: the newest of each operator."""
    expert_load: Literal["balanced", "power_law_1.01", "power_law_1.2", "counted"] = (
        "power_law_1.01"
    )
    """How tokens are spread over experts: evenly, by a power law of that exponent, or `counted`: by
    1.01, but at least with the active experts counted in DeepSeek-V3 on the busiest of 8 ranks.
    """
    expert_kernel: str | None = None
    """Part of the name of the kernel that computes experts; null: that of the newest tables."""
    product_tflops: Positive | None = None
    """The most TFLOP/s that quantised products reach on a GPU, where the engine's options choose a
    slower kernel than the tables'; null: as measured.
    """
    prompt_scale: Positive = 1.0
    """Factor on the seconds of micro-batches with prompts, over the sum of their operators."""
    all_reduce: NameOrAllReduce | None = None
    """The link or points in place of the measured all-reduces; null: those."""

    def make(self, hardware: Hardware) -> MadeCosts:
        from evenflow.costs.silicon.cost import silicon_cost, silicon_source

        deployment = hardware.deployment
        source = silicon_source(
            deployment, self.framework, self.version, self.expert_load, self.expert_kernel
        )
        other = self.all_reduce is not None or hardware.spans_nodes
        fabric, apart = hardware.fabric() if other else None, deployment.data_parallel > 1
        most = self.product_tflops
        cost = silicon_cost(deployment, source, fabric, "own" if apart else "all", most)
        made = MadeCosts(cost, cost, source.facts(), prompt_scale=self.prompt_scale)
        if apart:
            made = made._replace(experts=silicon_cost(deployment, source, fabric, "experts", most))
        return made


class EngineCosts(Keys):
    """Steps of AIConfigurator's compiled engine, from the package of the extra `silicon`."""

    NEEDS: ClassVar[tuple[str, ...]] = ("model", "gpu")

    kind: Literal["aiconfigurator"]
    framework: Literal["vllm", "sglang", "trtllm"] = "vllm"
    """The engine whose steps are predicted."""
    version: str | None = None
    """The framework's version; null: the one that the package calls current."""

    def make(self, hardware: Hardware) -> MadeCosts:
        from evenflow.costs.aiconfigurator.cost import engine_cost, facts

        deployment, apart = hardware.deployment, hardware.deployment.data_parallel > 1
        asked = self.framework, self.version
        cost = engine_cost(deployment, *asked, "own" if apart else "all")
        made = MadeCosts(cost, cost, facts(deployment, *asked))
        if apart:
            made = made._replace(experts=engine_cost(deployment, *asked, "experts"))
        return made


MEASURED_COSTS = ("silicon", "aiconfigurator")
"""Kinds of costs that rest on the package's measurements."""

Costs = Annotated[
    AffineCosts | RooflineCosts | ProfileCosts | SiliconCosts | EngineCosts,
    short_form("kind"),
    Discriminator("kind"),
]


Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class SpeculativeConfig(Keys):
    """Speculative decoding: proposed tokens, their acceptance, and one of two costs of drafts."""

    k: Instances = Field(examples=[3])
    """Tokens proposed a step."""
    acceptance: Probability | list[Probability] = Field(examples=[0.7])
    """The probability that a proposed token is accepted, if those before it were; or k of them, by
    position.
    """
    draft_cost_share: NonNegative | None = None
    """What a proposal costs, as a share of a decode step of the model; 0: free, as from n-grams."""
    draft_model: str | None = None
    """A model whose decode step is what a proposal costs, and which takes memory; mtp: the model's
    own layer that predicts a further token.
    """

    @model_validator(mode="after")
    def _one_draft(self) -> Self:
        if (self.draft_cost_share is None) == (self.draft_model is None):
            keys = '"speculative.draft_cost_share" or "speculative.draft_model", one of them'
            raise needed("speculative", keys)
        return self

    def make(self) -> Speculation:
        """Return the numbers of tokens that a decode step proposes and yields."""
        given = self.acceptance
        acceptance = given if isinstance(given, list) else [given] * self.k
        if len(acceptance) != self.k:
            what = f"acceptance has {len(acceptance)} numbers; k = {self.k} is right"
            raise UsageError(f"speculative: {what}")
        return Speculation(tuple(acceptance))

    def drafted(self, cost: StageCost, costs: Keys, hardware: Hardware) -> StageCost:
        """Return the costs plus the cost of proposing tokens; `costs` are the keys of both."""
        groups = 1 if hardware.placed is None else hardware.placed.data_parallel
        if self.draft_model is None:
            share = self.draft_cost_share or 0.0
            return DraftedCost(cost, self.k, share_of(cost, share), groups) if share else cost
        if not isinstance(costs, RooflineCosts | SiliconCosts | EngineCosts):
            raise UsageError(
                "speculative.draft_model: its costs need costs.kind: roofline, silicon or "
                "aiconfigurator; or give a draft_cost_share"
            )
        drafting = hardware.deployment.drafting()
        if drafting.model.is_mtp:  # of several modules a proposal passes one
            module = replace(drafting.model, num_layers=1)
            drafting = replace(drafting, model=module, layers_per_stage=(1,))
        alone = hardware._replace(stages=1, spec=drafting.model, placed=drafting)
        made = costs.make(alone)
        draft = made.on_ranks(made.cost, groups)
        return DraftedCost(cost, self.k, step_of(draft), groups, prompts_of(draft))
