"""ShareGPT: a JSON array of conversations, as text to be tokenized or as lengths.

Knows two shapes of entry: `conversations: [{from, value}, ...]`, of which the first turn is the
prompt and the second the reply whatever their roles (as vLLM's benchmark takes them), and
`input_token_length` with `output_token_length` (as TD-Pipe's predictor writes them). The array is
never in memory as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from evenflow.errors import once
from evenflow.files import load_tokenizer
from traces.source import CountTokens, Row, Source, shown, token_count

CHUNK_CHARACTERS = 2**20
PROMPT, OUTPUT = "input_token_length", "output_token_length"


class ShareGpt:
    """Reads both shapes of entry; text needs `source.count_tokens`."""

    layout: Literal["json"] = "json"
    columns: tuple[str, ...] = ("conversations",)
    ticks_per_s: int = 1
    block_tokens: int = 0

    def rows(self, source: Source) -> Iterator[Row]:
        """Yield a row an entry. Raises UsageError naming the entry (from 1) that is wrong."""
        for number, entry in enumerate(array_items(source), start=1):
            try:
                yield read_entry(entry, source.count_tokens)
            except ValueError as error:
                raise source.error(str(error), entry=number) from None


def read_entry(entry: object, count_tokens: CountTokens | None) -> Row:
    """Return the row of one entry; an entry that holds no prompt and reply is marked dropped."""
    if isinstance(entry, Mapping) and PROMPT in entry and OUTPUT in entry:
        return Row(None, token_count(PROMPT, entry[PROMPT]), token_count(OUTPUT, entry[OUTPUT]))
    turns = entry.get("conversations") if isinstance(entry, Mapping) else None
    if not isinstance(turns, list):
        raise ValueError(f"{shown(entry)}; expected conversations, or {PROMPT} and {OUTPUT}")
    if len(turns) < 2:
        return Row(None, 0, 0, "fewer than two turns")
    if count_tokens is None:
        raise ValueError(
            "text without lengths; give tokenizer: the path of a tokenizer.json, "
            f"or a file with {PROMPT} and {OUTPUT}"
        )
    prompt, reply = (turn.get("value") if isinstance(turn, Mapping) else None for turn in turns[:2])
    if not isinstance(prompt, str) or not isinstance(reply, str):
        raise ValueError(f"turns {shown(turns[:2])}; expected objects with a text value")
    return Row(None, count_tokens(prompt), count_tokens(reply), text=prompt)


def array_items(source: Source) -> Iterator[object]:
    """Yield the items of the JSON array in a file, reading no further than the item asked for."""
    decoder, stream = json.JSONDecoder(object_pairs_hook=once), source.stream
    text = stream.read(CHUNK_CHARACTERS).lstrip()
    if not text.startswith("["):
        raise source.error(f"starts with {shown(text[:20])}; expected a JSON array")
    number, place = 0, 1
    while True:
        text, place = text_to_come(source, text, place)
        if text[place : place + 1] == "]":
            return
        try:
            item, place = decoder.raw_decode(text, place)
        except (json.JSONDecodeError, RecursionError) as error:
            # Doubling what is read keeps one very long entry from costing quadratic time.
            more = stream.read(max(CHUNK_CHARACTERS, len(text)))
            if not more:
                message = f"not valid JSON, or truncated ({error})"
                raise source.error(message, entry=number + 1) from None
            text, place = text[place:] + more, 0
            continue
        except ValueError as error:
            raise source.error(str(error), entry=number + 1) from None
        number += 1
        yield item


def text_to_come(source: Source, text: str, place: int) -> tuple[str, int]:
    """Skip blanks and commas from `place`, reading on; raise UsageError if nothing comes."""
    while True:
        while place < len(text) and text[place] in " \t\r\n,":
            place += 1
        if place < len(text):
            return text, place
        text, place = source.stream.read(CHUNK_CHARACTERS), 0
        if not text:
            raise source.error('truncated JSON; expected "]" at the end')


def encoder(path: str | Path) -> Callable[[str], list[int]]:
    """Return what makes token ids of text, by a local tokenizer.json (or the folder with one).

    Special tokens are those that the tokenizer adds. Needs the extra `tokenizers`.
    """
    tokenizer = load_tokenizer(path)
    return lambda text: list(tokenizer.encode(text).ids)
