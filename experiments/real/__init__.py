"""Real runs: a trace or clients served by the runtime's processes."""
