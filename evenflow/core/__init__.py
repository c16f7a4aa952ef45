"""What every policy needs: the loop, the batcher, its queues and the KV cache."""
