"""Looks at a machine for what keeps an engine or its daemon from running well."""
