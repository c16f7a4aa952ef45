"""Replicas follow the queue, by the rule of Kubernetes' HorizontalPodAutoscaler.

wanted = ceil(replicas x requests a replica / target), looked at every 15 s; of the last five
minutes' wishes the highest counts when it goes down (the stabilisation window). A replica takes
requests `start_s` after it is asked for, and its hours count from then on.
"""

from collections import deque
from math import ceil


def autoscaler(
    world,
    *,
    target: int = 16,
    least: int = 1,
    most: int = 8,
    start_s: float = 120.0,
    every_s: float = 15.0,
    window_s: float = 300.0,
):
    wishes = deque(maxlen=max(round(window_s / every_s), 1))
    starting, hours = 0, 0.0

    def start():
        nonlocal starting
        yield world.env.timeout(start_s)
        starting -= 1
        world.replicas.add()

    while True:
        yield world.env.timeout(every_s)
        running = len(world.replicas.open)
        hours += (running + starting) * every_s / 3600
        load = sum(world.queue)
        wishes.append(min(max(ceil(load / target), least), most))
        if wishes[-1] != running:
            words = f"{load} requests ask for {wishes[-1]} replicas of {running}"
            world.log("scale", f"{words}; {hours:.2f} replica-hours so far")
        for _ in range(wishes[-1] - running - starting):
            starting += 1
            world.env.process(start())
        for number in world.replicas.open[max(wishes) :]:
            world.replicas.drain(number)
