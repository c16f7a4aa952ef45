"""Shared parts of all engines' journals: a file of events, and how far ours are equal."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import yaml

from evenflow.core.batch import MicroBatch
from evenflow.core.batcher import Batcher
from evenflow.core.decodes import Sequence as Served
from evenflow.core.request import Prefix, Request
from evenflow.core.scheduling import Scheduler
from evenflow.costs import AffineCost
from evenflow.engines.queues import EngineQueues
from evenflow.engines.receiving import Agreed, ReceivingQueues, act_on
from evenflow.errors import DryPoolError, PolicyError, StallError, UsageError, is_count
from evenflow.keys import MOST_INSTANCES, shown
from evenflow.schedulers import create, parameters, policy
from evenflow.sim import World, simulate
from evenflow.user_code import words_of

Event = Mapping[str, Any]


class ReplayOutcome(NamedTuple):
    """Number of steps in a journal, of equal ones before the first `difference`, and that.

    `timed` requests, of a journal that has times, were simulated too, with times equal to 1 ns.
    `warning`: what weakens the comparison; "" for nothing.
    """

    steps: int
    equal: int
    difference: str | None = None
    timed: int = 0
    warning: str = ""


Ask = Callable[[], MicroBatch | None]
Answers = Iterator[tuple[str, Any, Any]]


class EngineFacts(NamedTuple):
    """An engine's journals (engines.yaml): our policy for it, with the rules of some versions.

    `mark`: a key that only its config has. `fields`: what each kind of event has to hold. `rules`
    say what decides each part of an answer. `settings`: those of a config by our names, where they
    differ. `modelled`: settings with the one value that is.
    """

    name: str
    versions: Sequence[str]
    policy: str
    mark: str
    fields: Mapping[str, Collection[str]]
    rules: Mapping[str, str]
    not_covered: str
    settings: Mapping[str, str] = MappingProxyType({})
    modelled: Mapping[str, object] = MappingProxyType({})


@cache
def _facts() -> Mapping[str, EngineFacts]:
    text = Path(__file__).with_name("engines.yaml").read_text(encoding="utf-8")
    return {name: EngineFacts(**facts) for name, facts in yaml.safe_load(text).items()}


def facts_of(engine: str) -> EngineFacts:
    return _facts()[engine]


class Form(Protocol):
    """A reader of the journals of an engine: a module of this package.

    `scheduler_of` gives the policy of a name with those of a journal's settings that it has.
    `deployment` gives the other fields of its World, and the `contents` of requests where there is
    a prefix cache. UsageError for what is not modelled. `answers`: the parts of an answer, ours and
    as recorded, in the order in which they are compared. `ask` asks our Batcher.
    """

    @property
    def FACTS(self) -> EngineFacts: ...  # noqa: N802
    def scheduler_of(self, config: Event, name: str) -> Scheduler: ...
    def deployment(self, path: Path, events: Sequence[Event]) -> dict[str, Any]: ...
    def answers(self, batcher: Batcher, event: Event, ask: Ask) -> Answers: ...


class RequestTimes(NamedTuple):
    """Times at which a request got its first token and its last, in seconds."""

    first_token_s: float
    completion_s: float


class Replayer:
    """Feeds the events of a journal to the Batcher of a world, and compares what it answers.

    The micro-batches travel first in, first out. `times` come from the journal's clock.
    """

    def __init__(self, form: Form, world: World) -> None:
        self._form = form
        self._requests = {request.request_id: request for request in world.requests}
        self.batcher = world.batcher()
        self._travelling: deque[MicroBatch] = deque()
        self.times: dict[int, RequestTimes] = {}

    def feed(self, event: Event, now_s: float) -> str | None:
        """Apply an event; return what is not as recorded, or None."""
        if event["kind"] == "add":
            return self.batcher.add(self._requests[event["id"]])
        if event["kind"] == "ask":
            answers = self._form.answers(self.batcher, event, lambda: self.ask(now_s))
            return self._first(answers)
        if event["kind"] == "released":
            self._let_go(event["ids"], now_s)
        if event["kind"] == "round":
            return self._first(self._agree(event, now_s))
        if event["kind"] == "done" and self._travelling and event.get("ids", True):
            ended = self.batcher.complete(self._travelling.popleft(), now_s)
            numbers = sorted(seq.request.request_id for seq in ended)
            self._note(ended)
            recorded = sorted(event.get("finished", numbers))
            if numbers != recorded:
                return self._differ("finished", numbers, recorded)
        return None

    def _first(self, answers: Answers) -> str | None:
        return next((self._differ(*each) for each in answers if each[1] != each[2]), None)

    def _agree(self, event: Event, now_s: float) -> Answers:
        """Act on what the stages of a decode server agree on, and compare what comes of it."""
        queues = self.batcher.queues
        assert isinstance(queues, ReceivingQueues)
        arriving, arrived = [*queues.arriving], [*queues.arrived]
        agreed = Agreed(*(event[name] for name in ("retracted", "waiting", "there")))
        act_on(self.batcher, agreed, now_s)
        back = [seq.request.request_id for seq in queues.arrived if seq not in arrived]
        yield "resumed", back, [*event["resumed"], *event["arrived"]]
        allocated = [seq.request.request_id for seq in queues.arriving if seq not in arriving]
        yield "allocated", allocated, event["allocated"]
        pool = self.batcher.pool
        yield "free tokens", pool.empty_pages * pool.page_tokens, event["free"]

    def _let_go(self, numbers: Sequence[int], now_s: float) -> None:
        """Free the pages of requests that another engine has now, and end them."""
        queues = self.batcher.queues
        assert isinstance(queues, EngineQueues)
        for number in numbers:
            queues.let_go(queues.leaving[number])
            self.times[number] = RequestTimes(now_s, now_s)

    def ask(self, now_s: float) -> MicroBatch | None:
        """Ask the Batcher; what it sends travels until it is done."""
        try:
            batch = self.batcher.next(now_s)
        except StallError:  # the engine may wait for ever too
            return None
        if batch is not None:
            self._travelling.append(batch)
        queues = self.batcher.queues
        if isinstance(queues, ReceivingQueues):
            self._note(queues.ended)
            queues.ended.clear()
        return batch

    def _note(self, ended: Sequence[Served]) -> None:
        self.times |= {
            seq.request.request_id: RequestTimes(seq.first_token_s, seq.completion_s)
            for seq in ended
        }

    def _differ(self, name: str, ours: object, theirs: object) -> str:
        return f"{differ(name, ours, theirs)} ({self._form.FACTS.rules[name]})"


def replay(path: Path, form: Form, version: str, scheduler: str | None = None) -> ReplayOutcome:
    """Replay a journal by the rules of a version, through its policy or the one of a `scheduler`.

    What a journal of equal steps took on a virtual clock is simulated too, and compared to 1 ns.
    UsageError for a file that cannot be read, or settings that are not modelled.
    """
    config, *rest = read(path, form.FACTS.fields)
    events = [{**config, "version": version}, *rest]
    try:
        world = world_of(form, path, events, scheduler)
        replayer = Replayer(form, world)
        outcome = replayed(events, replayer)
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
        raise UsageError(f"{path}: holds values of other kinds: {words_of(error)}") from error
    if outcome.difference is not None or "base_s" not in events[0]:
        return outcome
    dies = events[-1]["kind"] == "dies"
    try:
        ours = simulated(world)
    except DryPoolError as error:
        return outcome if dies else outcome._replace(difference=str(error))
    if dies:
        return outcome._replace(difference="the simulated engine does not die")
    for number, theirs in replayer.times.items():
        for name, one, other in zip(RequestTimes._fields, ours[number], theirs, strict=True):
            if not abs(one - other) <= 1e-9:
                what = f"request {number}, {name}: {one!r}, recorded {other!r}"
                return outcome._replace(difference=f"{what} ({form.FACTS.rules[name]})")
    return outcome._replace(timed=len(replayer.times))


def replayed(events: Sequence[Event], replayer: Replayer) -> ReplayOutcome:
    """Feed the events after a journal's `config` until something is not as recorded."""
    steps = sum(event["kind"] == "ask" for event in events)
    step = 0
    for number, event in enumerate(events[1:]):
        try:
            what = replayer.feed(event, time_of(event, number))
        except (PolicyError, ValueError, LookupError) as error:
            what = str(error)
        if what is not None:
            return ReplayOutcome(steps, step, f"step {step}: {what}")
        step += event["kind"] == "ask"
    return ReplayOutcome(steps, step)


def simulated(world: World) -> dict[int, RequestTimes]:
    result = simulate(world)
    columns = result.request_id, result.first_token_s, result.completion_s
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {number: RequestTimes(first_s, last_s) for number, first_s, last_s in rows}


def policy_of(
    engine: EngineFacts, config: Event, name: str, more: Mapping[str, Any], **facts: Any
) -> Scheduler:
    """Return a policy with those settings of a journal's config, and of `more`, that it has."""
    named = {ours: config[key] for ours, key in engine.settings.items() if key in config}
    settings = {**config, **named, **more}
    known = parameters(policy(name))
    return create(name, {key: settings[key] for key in known if key in settings}, **facts)


NO_LIMIT = 1 << 30
"""Tokens of a request where an engine states no limit."""


def world_of(
    form: Form, path: Path, events: Sequence[Event], scheduler: str | None = None
) -> World:
    """Return the world of a journal's requests, on its clock, or one that does not matter.

    Its policy is the engine's, or the one of the name `scheduler`.
    """
    config, facts = events[0], form.FACTS
    refuse(path, config, facts.modelled)
    deployment = form.deployment(path, events)
    if not is_count(depth := deployment["depth"], MOST_INSTANCES):
        raise UsageError(f"{path}: {shown(depth)} stages; 1 to {MOST_INSTANCES} is right")
    contents = deployment.pop("contents", None)
    policy_name = scheduler or facts.policy.partition(",")[0]
    make_scheduler = partial(form.scheduler_of, config, policy_name)
    make_scheduler()  # a name that is none
    times_s = config.get("base_s", 1.0), config.get("per_token_s", 0.0)
    cost, cached = AffineCost(*times_s, depth), contents is not None
    requests = requests_of(events, contents)
    return World(requests, make_scheduler, cost, prefix_cache=cached, **deployment)


def time_of(event: Event, number: int) -> float:
    """Return when an event happened: by the journal's clock, or as many events after the first."""
    return float(event.get("now_s", event.get("t", number)))


def requests_of(events: Sequence[Event], contents: Contents | None = None) -> list[Request]:
    """Return the requests that a journal's `add` events stand for, by arrival."""
    found = [
        Request(
            event["id"],
            event.get("at", event.get("arrival_s", time_of(event, number))),
            event["prompt"],
            event["output"],
            prefix=None if contents is None else contents.prefix(event["id"], event["output"]),
            priority=event.get("priority", 0),
            max_new_tokens=None if event.get("ignore_eos") else event.get("max_new"),
        )
        for number, event in enumerate(events[1:])
        if event["kind"] == "add"
    ]
    return sorted(found, key=lambda request: request.arrival_s)


def read(path: Path, fields: Mapping[str, Collection[str]]) -> list[Event]:
    """Return the events of a journal, which have the `fields` of their kind.

    UsageError for a file that cannot be read to its end, and for an event without its fields.
    """
    events = list(lines(path))
    for number, event in enumerate(events, 1):
        kind = str(event.get("kind"))
        if kind not in fields:
            raise UsageError(f"{path}, line {number}: unknown event {kind[:40]!r}")
        for name in fields[kind]:
            if name not in event:
                raise UsageError(f"{path}, line {number}: {kind} without {name!r}")
    return events


def refuse(path: Path, config: Event, modelled: Mapping[str, object]) -> None:
    """Raise UsageError for settings that are modelled with one value, and have another."""
    for name, right in modelled.items():
        value = config.get(name)
        if value is not None and value != right:
            raise UsageError(f"{path}: {name}: {json.dumps(value)} is not modelled")


class Contents:
    """The tokens of each request: a journal's prompts, and `generated` (known, stop)."""

    def __init__(
        self, path: Path, block_tokens: int, generated: Callable[[int, int], list[int]]
    ) -> None:
        self._prompts = {line["id"]: line["prompt"] for line in lines(_prompts_of(path))}
        self._block_tokens = block_tokens
        self._generated = generated
        self._blocks: dict[tuple[int, ...], int] = {}

    def prefix(self, request_id: int, output_tokens: int) -> Prefix:
        """Return the prefix of a request: its prompt and what it will generate."""
        prompt = self._prompts[request_id]
        stop = len(prompt) + output_tokens
        tokens = [*prompt, *self._generated(len(prompt), stop)]
        starts = range(0, stop, self._block_tokens)
        blocks = [tuple(tokens[start : start + self._block_tokens]) for start in starts]
        numbers = tuple(self._blocks.setdefault(block, len(self._blocks)) for block in blocks)
        return Prefix(numbers, self._block_tokens, stop)


def _prompts_of(path: Path) -> Path:
    """Return the file of prompts beside a journal: NAME-prompts, for a beginning of its name."""
    words = path.name.removesuffix(".jsonl.gz").split("-")
    for count in range(len(words), 0, -1):
        beside = path.with_name("-".join([*words[:count], "prompts.jsonl.gz"]))
        if beside.is_file():
            return beside
    raise UsageError(f"{path}: prefix_caching needs the prompts, {words[0]}-prompts.jsonl.gz")


def tokens_of(batch: MicroBatch | None) -> dict[int, int]:
    """Return how many tokens of each request a micro-batch computes."""
    if batch is None:
        return {}
    tokens = {chunk.sequence.request.request_id: chunk.stop - chunk.start for chunk in batch.chunks}
    decoding = batch.decodes.members if batch.decodes is not None else ()
    return tokens | dict.fromkeys(decoding, 1)


def lines(path: Path) -> Iterator[Event]:
    """Iterate over the events of a file; UsageError when it cannot be read to its end."""
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                event = json.loads(line)
                if not isinstance(event, dict):
                    raise UsageError(f"{path}, line {number}: no event: {line.strip()[:40]}")
                yield event
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{path}, line {number}: no JSON: {error}") from None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        if isinstance(error, gzip.BadGzipFile) and number == 0:
            raise UsageError(f"{path}: no journal, which is JSON lines in gzip: {error}") from None
        raise UsageError(f"{path}: cannot be read to its end: {error}") from None


def first_line(path: Path) -> Event:
    """Return the first event of a file, or an empty one if it has none."""
    return next(lines(path), {})


def version_of(config: Event) -> str:
    """Return the version of the engine that wrote a journal, "" if its `config` does not say it."""
    return str(config.get("engine", "")).partition(" ")[2]


def differ(name: str, ours: object, theirs: object) -> str:
    """Describe how a part of an answer differs from the recorded one, and for which request."""
    if isinstance(ours, int | float) or isinstance(theirs, int | float):
        return f"{name}: {ours}, recorded {theirs}"
    assert isinstance(ours, Collection)
    assert isinstance(theirs, Collection)
    request = next((one for one, other in zip(ours, theirs, strict=False) if one != other), None)
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        unequal = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        request = unequal[0]
        ours, theirs = ours.get(request, 0), theirs.get(request, 0)
    elif request is None:
        request = next(
            number for number in (*ours, *theirs) if (number in ours) != (number in theirs)
        )
    return f"request {request}, {name}: {ours}, recorded {theirs}"
