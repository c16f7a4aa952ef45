"""Turn a checked configuration into a world of pipelines with one policy: costs, pages, links.

Here names become things: the model, the GPU, the link and the scheduler. Reads no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evenflow.costs import StageCost, estimates
from evenflow.errors import PolicyError, UsageError
from evenflow.schedulers import create, policy
from evenflow.specs.deployment import Deployment
from evenflow.specs.gpu import gpu
from evenflow.specs.model import model
from evenflow.types import Request, Scheduler
from evenflow.world import RUNTIMES, RuntimeOverheads, World
from experiments.run_file.build_costs import (
    costs_of,
    deployment_of,
    fabric_of,
    links_of,
    speculation_of,
    with_drafts,
    with_swap,
)
from experiments.run_file.build_measured import MeasuredCosts, measured_costs
from experiments.run_file.policy import check_parameter_types
from experiments.run_file.run import RunConfig
from experiments.run_file.workload import ClosedArrivals
from sim import PooledWorld
from traces import (
    make_predictor,
    with_predictions,
)


@dataclass(frozen=True, slots=True)
class Built:
    """A world ready to simulate, and what its costs and its pages follow from.

    `pools` are the parts of a world of pools, each built as a run of its own.
    """

    world: World | PooledWorld
    formula: dict[str, Any]
    deployment: dict[str, Any]
    tables: MeasuredCosts | None = None
    pools: Mapping[str, Built] = field(default_factory=dict)

    @property
    def cost_source(self) -> dict[str, Any]:
        """Where the seconds come from; of tables also, how much of them no measurement surrounds.

        That share is known after the run.
        """
        source = self.formula if self.tables is None else self.formula | self.tables.facts()
        parts = {name: built.cost_source for name, built in self.pools.items()}
        return source | ({"pools": parts} if parts else {})


def build_world(
    config: RunConfig, requests: list[Request], beside: Path, texts: Sequence[str] | None = None
) -> Built:
    """Return the world of pipelines with one policy; UsageError for what cannot be."""
    spec = None if config.model is None else model(find(config.model, beside))
    if config.gpu is not None:
        gpu(config.gpu)  # refuses what is none, whether these costs need it or not

    def resolve(path: str) -> str:
        return find(path, beside)

    deployment = deployment_of(config, spec, resolve)
    tables = measured_costs(config, spec, deployment, lambda: fabric_of(config), resolve)
    costs = costs_of(config, spec, deployment, tables)
    pages = config.kv.pages
    if isinstance(pages, str):
        assert deployment is not None  # the schema asks for model and GPU
        pages = deployment.kv_pages()
    most = pages * config.kv.page_tokens if spec is None else spec.max_position_embeddings
    make_scheduler = _scheduler_maker(config, costs, config.max_model_len or most)
    scheduler = make_scheduler()
    link, hop_links = links_of(config, costs)
    world = World(
        requests=_predicted(requests, texts, scheduler, config.workload.seed, beside),
        make_scheduler=make_scheduler,
        costs=with_swap(config, with_drafts(config, costs, deployment), spec, deployment),
        depth=config.num_stages,
        total_pages=pages,
        max_model_len=config.max_model_len or most,
        page_tokens=config.kv.page_tokens,
        max_in_flight=_cap(config, scheduler),
        virtual_engines=_engines(config),
        dispatch=config.dispatch,
        pipelined_chunks=config.pipelined_chunks,
        overheads=_overheads(config),
        link=link,
        hop_links=hop_links,
        concurrency=concurrency_of(config),
        speculation=speculation_of(config),
        replicas=1 if config.replicas is None else config.replicas.count,
        router="round_robin" if config.replicas is None else config.replicas.router,
        prefix_cache=config.kv.prefix_cache,
        swap=config.kv.swap,
    )
    facts = _deployment_facts(world, deployment)
    return Built(world, cost_source_of(config), facts, tables)


def find(name: str, beside: Path) -> str:
    """Return where a file is: in the current folder, or else in `beside`; or the name as it is."""
    below = beside / name
    return str(below) if not Path(name).exists() and below.exists() else name


def _scheduler_maker(
    config: RunConfig, costs: StageCost, max_model_len: int
) -> Callable[[], Scheduler]:
    name, params = config.scheduler.name, config.scheduler.params
    check_parameter_types(name, policy(name), params)

    def make() -> Scheduler:
        try:
            return create(name, params, max_model_len=max_model_len, **estimates(costs))
        except UsageError:
            raise
        except Exception as error:  # a user's own class may raise anything
            raise PolicyError(
                f"scheduler {name}: its constructor raised {type(error).__name__}: {error}"
            ) from error

    return make


def _predicted(
    requests: list[Request],
    texts: Sequence[str] | None,
    scheduler: Scheduler,
    seed: int,
    beside: Path,
) -> list[Request]:
    """Return the requests with the output lengths that the policy's predictor foretells."""
    spec = getattr(scheduler, "predictor", None)
    if spec is None or not requests:
        return requests
    if isinstance(spec, Mapping):
        spec = dict(spec)
        if spec.get("kind") == "noisy":
            spec.setdefault("seed", seed)
        if isinstance(spec.get("path"), str):
            spec["path"] = find(spec["path"], beside)
    texts = None if texts is None else texts[: len(requests)]
    return with_predictions(requests, make_predictor(spec), texts)


def _cap(config: RunConfig, scheduler: Scheduler) -> int | None:
    given = config.max_in_flight
    if given == "unlimited" or (given is None and getattr(scheduler, "uncapped", False)):
        return None
    return config.num_stages if given is None else given


def _engines(config: RunConfig) -> int:
    if isinstance(config.virtual_engines, bool):
        return config.num_stages if config.virtual_engines else 1
    return config.virtual_engines


def _overheads(config: RunConfig) -> RuntimeOverheads:
    if isinstance(config.runtime, str):
        return RUNTIMES[config.runtime]
    return RuntimeOverheads(**config.runtime.model_dump())


def concurrency_of(config: RunConfig) -> int | None:
    """Return how many requests a closed loop holds; None for open arrivals."""
    arrivals = config.workload.arrivals
    return arrivals.concurrency if isinstance(arrivals, ClosedArrivals) else None


def cost_source_of(config: RunConfig) -> dict[str, Any]:
    """Say which formula the seconds come from, which is measured on no device of ours."""
    source: dict[str, Any] = {"kind": config.costs.kind}
    if config.costs.kind == "roofline" and config.gpu is not None:
        source["gpu"] = asdict(gpu(config.gpu))
    return source | {"device": None, "driver": None, "torch": None}


def _deployment_facts(world: World, deployment: Deployment | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "stages": world.depth,
        "kv_pages": world.total_pages,
        "page_tokens": world.page_tokens,
        "max_model_len": world.max_model_len,
    }
    if deployment is None:
        return facts
    return facts | {
        "layers_per_stage": list(deployment.layers_per_stage),
        "weight_bytes_per_gpu": _per_stage(deployment.depth, deployment.weight_bytes),
        "activation_bytes_per_gpu": _per_stage(deployment.depth, deployment.activation_bytes),
        "kv_bytes_per_token": _per_stage(deployment.depth, deployment.kv_bytes_per_token),
    }


def _per_stage(depth: int, quantity: Callable[[int], int]) -> list[int]:
    return list(map(quantity, range(depth)))
