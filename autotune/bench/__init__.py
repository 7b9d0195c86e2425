"""Benchmark of the daemon: what it costs, what it survives, what it keeps. The last line is JSON.

Real processes on the bundled model: an engine, a daemon, and this one, which is the client too.
"""
