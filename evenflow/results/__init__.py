"""What a run came to: its columns, metrics, and the causes of its idle time."""
