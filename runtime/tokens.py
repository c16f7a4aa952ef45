"""The token ids of the requests being served, on the driver's side: prompts, and what was sampled.

Knows ids and how each request draws its next one; no pages, no sockets, no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from evenflow.runtime.wire import Draw
from evenflow.types import Chunk, Prefix, Request


@dataclass(frozen=True, slots=True)
class Text:
    """The ids of a request's prompt, and how its tokens are drawn; without `draw`, greedily.

    A token of `stop_ids` ends the request before its limit.
    """

    prompt_ids: Sequence[int]
    draw: Draw | None = None
    stop_ids: frozenset[int] = frozenset()


UNKNOWN = -1
"""In the place of an id that only the workers have."""

TextOf = Callable[[Request], Text]
"""Returns what a request says. Asked once, when its first piece is sent."""


@dataclass(frozen=True, slots=True)
class RandomTexts:
    """Made-up prompts for requests of which only the length is known, and what they have in common.

    Ids are below `vocabulary`. Those of the prefix's blocks follow from `seed` and the blocks, the
    others from `seed` and the request's id. `prompts`, by request id, are said as they are.
    `sampling` is (temperature, top_k, top_p); what is drawn follows from `sampling_seed` and the
    request's id. Nothing ends a request early, so that it has the length that its trace gives.
    """

    vocabulary: int
    seed: int
    sampling: tuple[float, int, float] = (0.0, 0, 1.0)
    sampling_seed: int = 0
    prompts: Sequence[Sequence[int]] | None = None

    def __call__(self, request: Request) -> Text:
        said = self.prompts
        ids = self._prompt_of(request) if said is None else said[request.request_id]
        if not self.sampling[0]:
            return Text(ids)
        drawn_from = np.random.SeedSequence((self.sampling_seed, request.request_id))
        seed = int(drawn_from.generate_state(1)[0])
        return Text(ids, Draw(request.request_id, *self.sampling, seed))

    def _prompt_of(self, request: Request) -> list[int]:
        prefix = request.prefix or Prefix((), 1, 0)
        named = min(request.prompt_tokens, prefix.tokens)
        ids: list[int] = []
        for start, block in zip(range(0, named, prefix.block_tokens), prefix.blocks, strict=False):
            ids += self._content(block, min(prefix.block_tokens, named - start))
        return ids + self._content(request.request_id, request.prompt_tokens - len(ids))

    def _content(self, block: int, tokens: int) -> list[int]:
        """Return the first tokens of a block; a request's own are those of one of its number."""
        name = (self.seed, block) if block >= 0 else (self.seed, -block, 1)
        ids: list[int] = np.random.default_rng(name).integers(self.vocabulary, size=tokens).tolist()
        return ids


class _LiveText(NamedTuple):
    text: Text
    ids: list[int]


class TokenBook:
    """All ids of the live requests. What was sampled before a preemption is prompt afterwards."""

    def __init__(self, text_of: TextOf) -> None:
        self._text_of = text_of
        self._live: dict[int, _LiveText] = {}

    def __len__(self) -> int:
        return len(self._live)

    def inputs(
        self,
        chunks: Sequence[Chunk],
        decodes: Sequence[int],
        ahead: Mapping[int, int] | None = None,
    ) -> list[int]:
        """Return the inputs of stage 0: the ids of each chunk, then each decode's last one.

        `ahead` has how many output tokens a decode then has. Its input is UNKNOWN if the one before
        is on its way.
        """
        ids: list[int] = []
        for chunk in chunks:
            ids += self._of(chunk.sequence.request).ids[chunk.start : chunk.stop]
        for request_id in decodes:
            live = self._live[request_id]
            known = len(live.ids) - len(live.text.prompt_ids)
            count = 0 if ahead is None else ahead[request_id]
            ids.append(UNKNOWN if count > known + 1 else live.ids[-1])
        return ids

    def draws(self, request_ids: Iterable[int]) -> list[Draw]:
        """Return the draws of live requests, without greedy ones."""
        texts = (self._live[request_id].text for request_id in request_ids)
        return [text.draw for text in texts if text.draw is not None]

    def sampled(self, request_ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Note a token for each; return the requests that it ends. Unknown ones have left."""
        stopped = []
        for request_id, token in zip(request_ids, tokens, strict=True):
            live = self._live.get(request_id)
            if live is not None:
                live.ids.append(token)
                if token in live.text.stop_ids:
                    stopped.append(request_id)
        return stopped

    def ended(self, request_id: int) -> None:
        self._live.pop(request_id, None)

    def _of(self, request: Request) -> _LiveText:
        live = self._live.get(request.request_id)
        if live is None:
            text = self._text_of(request)
            live = self._live[request.request_id] = _LiveText(text, list(text.prompt_ids))
        return live
