"""A small BERT: an encoder that reads a text, whose [CLS] names a class.

Its two layers are trained from scratch, on the words of the training texts; nothing is pretrained.
Knows no trace and no file. Needs torch.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from evenflow.traces.trace import Ints

WIDTH, LAYERS, HEADS = 64, 2, 4
LONGEST = 512
"""Tokens of a text that are read, as in BERT: [CLS] and the first words."""

MOST_WORDS = 8192
PADDING, CLS, UNKNOWN, FIRST_WORD = range(4)
WORD = re.compile(r"\w+|[^\w\s]")

BATCH = 32
MOST_EPOCHS, PATIENCE = 10, 2
LEARNING_RATE = 1e-3


class Sample(NamedTuple):
    """Texts as token ids, and the class of each."""

    texts: Sequence[list[int]]
    classes: Ints


def vocabulary_of(texts: Sequence[str]) -> list[str]:
    """Return the most frequent words of these texts, the most frequent first."""
    counts = Counter(word for text in texts for word in WORD.findall(text.lower()))
    return [word for word, _ in counts.most_common(MOST_WORDS)]


def ids_of(texts: Sequence[str], vocabulary: Sequence[str]) -> list[list[int]]:
    """Return texts as the encoder reads them: [CLS], then words and signs."""
    known = {word: FIRST_WORD + index for index, word in enumerate(vocabulary)}
    words = (WORD.findall(text.lower())[: LONGEST - 1] for text in texts)
    return [[CLS, *(known.get(word, UNKNOWN) for word in each)] for each in words]


def untrained(num_words: int, num_classes: int) -> nn.ModuleDict:
    """Return an encoder for a vocabulary of `num_words`, with random weights."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, activation="gelu", batch_first=True)
    head = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, num_classes))
    return nn.ModuleDict(
        {
            "words": nn.Embedding(FIRST_WORD + num_words, WIDTH, padding_idx=PADDING),
            "places": nn.Embedding(LONGEST, WIDTH),
            "layers": nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False),
            "head": nn.Sequential(*head),
        }
    )


def restored(weights: Mapping[str, Tensor], num_words: int, num_classes: int) -> nn.ModuleDict:
    """Return an encoder with these weights; ValueError where they do not fit."""
    with torch.device("meta"):
        encoder = untrained(num_words, num_classes)
    expected = {name: (one.shape, one.dtype) for name, one in encoder.state_dict().items()}
    if {name: (one.shape, one.dtype) for name, one in weights.items()} != expected:
        raise ValueError("shapes of the weights")
    if not all(bool(one.isfinite().all()) for one in weights.values()):
        raise ValueError("weights that are not finite")
    encoder.load_state_dict(weights, assign=True)
    return encoder.eval()


def fitted(
    num_words: int, num_classes: int, training: Sample, validation: Sample, seed: int
) -> nn.ModuleDict:
    """Return an encoder fitted to a sample, as it was in the epoch with the least validation loss.

    PATIENCE epochs without a lower loss end the training.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _fitted(untrained(num_words, num_classes), training, validation)


def _fitted(encoder: nn.ModuleDict, training: Sample, validation: Sample) -> nn.ModuleDict:
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=LEARNING_RATE)
    best, least, worse = encoder.state_dict(), math.inf, 0
    for _ in range(MOST_EPOCHS):
        _one_epoch(encoder, optimizer, training)
        if (loss := _loss(encoder, validation)) < least:
            best, least, worse = deepcopy(encoder.state_dict()), loss, 0
        elif (worse := worse + 1) == PATIENCE:
            break
    encoder.load_state_dict(best)
    return encoder.eval()


def _one_epoch(encoder: nn.ModuleDict, optimizer: torch.optim.Optimizer, sample: Sample) -> None:
    encoder.train()
    batches = _batches(sample.texts, torch.randperm(len(sample.texts)).numpy())
    for index in torch.randperm(len(batches)).tolist():
        loss = _cross_entropy(encoder, sample, batches[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _loss(encoder: nn.ModuleDict, sample: Sample) -> float:
    encoder.eval()
    with torch.inference_mode():
        batches = _batches(sample.texts, np.arange(len(sample.texts)))
        sums = [len(rows) * _cross_entropy(encoder, sample, rows).item() for rows in batches]
    return math.fsum(sums) / len(sample.texts)


def _cross_entropy(encoder: nn.ModuleDict, sample: Sample, rows: Ints) -> Tensor:
    scores = _scores(encoder, _padded(sample.texts, rows))
    return nn.functional.cross_entropy(scores, torch.from_numpy(sample.classes[rows]))


def classes_of(encoder: nn.ModuleDict, texts: Sequence[list[int]]) -> Ints:
    """Return the class with the highest score of each text, [n]."""
    named = np.empty(len(texts), dtype=np.int64)
    with torch.inference_mode():
        for rows in _batches(texts, np.arange(len(texts))):
            named[rows] = _scores(encoder, _padded(texts, rows)).argmax(dim=1).numpy()
    return named


def _scores(encoder: nn.ModuleDict, ids: Tensor) -> Tensor:
    """Return the scores of each class by the [CLS] of each text, from ids [texts, tokens]."""
    read = encoder["words"](ids) + encoder["places"].weight[: ids.shape[1]]
    seen = encoder["layers"](read, src_key_padding_mask=ids == PADDING)
    scores: Tensor = encoder["head"](seen[:, 0])
    return scores


def _batches(texts: Sequence[list[int]], order: Ints) -> list[Ints]:
    """Return `order` in batches of texts that are about as long, which need little padding."""
    rows = order[np.argsort([len(texts[row]) for row in order.tolist()], kind="stable")]
    return [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]


def _padded(texts: Sequence[list[int]], rows: Ints) -> Tensor:
    chosen = [torch.tensor(texts[row]) for row in rows.tolist()]
    return nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=PADDING)
