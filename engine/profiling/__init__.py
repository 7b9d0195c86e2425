"""Measures how long this machine's steps take, through the engine's own scheduler, core and runner."""
