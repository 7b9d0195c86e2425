"""A recording proxy: passes an OpenAI server's traffic through unchanged and writes down its shape. No torch."""
