"""RUN.yaml: its schema, its mistakes, and what a run is built from."""
