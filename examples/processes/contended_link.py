"""Somebody else's traffic on a link: while it is there, a share of the bandwidth is gone."""


def contended_link(
    world, hop: int = 0, share: float = 0.5, every_s: float = 10.0, lasts_s: float = 2.0
):
    link = world.links[hop]
    while True:
        yield world.env.timeout(world.rng.exponential(every_s))
        link.slow(1 / (1 - share))
        yield world.env.timeout(world.rng.exponential(lasts_s))
        link.slow(1)
