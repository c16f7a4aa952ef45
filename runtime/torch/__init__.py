"""Workers that compute with torch: the model, its shards, its inputs, and how they travel."""
