"""Request traces: loaders for the public forms, scaling, and generators fitted to published statistics. No torch."""
