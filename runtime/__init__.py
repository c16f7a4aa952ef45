"""The real world: worker processes, one a stage, with the same Batcher in the middle; torch models
of the shapes that are simulated, run stage by stage.

Importing the package imports neither torch nor ZeroMQ; its modules do.
"""
