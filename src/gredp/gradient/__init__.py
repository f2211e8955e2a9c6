"""The gradient path in travel order: per_sample → clip → summation → noise → inverse. No ε is computed."""
