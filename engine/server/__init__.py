"""The engine's HTTP faces: the OpenAI-compatible API on TCP, the control API on a Unix socket."""
