"""The first minutes of an engine: kernels are compiled and graphs captured as shapes come."""


def warm_up(world, factor: float = 3.0, lasts_s: float = 60.0):
    for replica in world.replicas:
        for stage in replica.stages:
            stage.slow(factor)
    yield world.env.timeout(lasts_s)
    for replica in world.replicas:
        for stage in replica.stages:
            stage.slow(1)
