"""The inference engine: scheduler, paged KV cache, models, server. Importing the package loads nothing heavy."""
