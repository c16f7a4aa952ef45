"""Experiments: the papers' figures, published runs reproduced, validation, recorded engines."""
