"""The real world: torch models of the shapes that are simulated, run stage by stage.

Importing the package imports no torch; its modules do.
"""
