"""The real world: worker processes, one a stage, around the Batcher of a simulation.

Their torch models have the shapes that are simulated, run stage by stage. `serve.serve` is to it
what `evenflow.sim.simulate` is to the simulated world. Importing the package imports neither torch
nor ZeroMQ; its modules do.
"""
