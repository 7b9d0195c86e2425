"""Replay a workload against an OpenAI-compatible server, open loop, and measure what its users would see. No torch."""
