"""Named random streams: each use of randomness draws from its own generator.

Knows nothing of what is drawn. Two parts of a run with streams of different names never disturb
each other, so a change of one (the arrival rate, say) leaves the other (the lengths) as it was.
"""

from __future__ import annotations

import zlib

import numpy as np


def random_stream(seed: int, name: str) -> np.random.Generator:
    """Return the generator of the stream `name` under `seed` (a whole number, 0 or more)."""
    spawn_key = (zlib.crc32(name.encode()),)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=spawn_key))
