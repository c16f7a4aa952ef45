"""Results of a run: its columns, metrics, and the causes of its idle time."""
