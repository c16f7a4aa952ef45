"""Core that every policy needs: the loop, the batcher, its queues and the KV cache.

Read in this order: request, kv, decodes, batch, queues, scheduling, rules, batcher, loop, world.
"""
