"""Gymnasium environments over the inference engine. Importing this package imports nothing else."""

from __future__ import annotations

LIVE_ENGINE_ID = "kv-autotune/LiveEngine-v1"
SIMULATED_ENGINE_ID = "kv-autotune/SimulatedEngine-v0"
SIMULATED_STEPS = 300  # control intervals until gymnasium's TimeLimit truncates


def register_envs() -> None:
    """Make the environments known to ``gymnasium.make``; may be called more than once.

    ``gymnasium.make(LIVE_ENGINE_ID, port=...)`` then builds :class:`envs.live.LiveEngine`, and
    ``gymnasium.make(SIMULATED_ENGINE_ID)`` :class:`envs.simulated.SimulatedEngine`, imported only at that point.
    """
    from gymnasium.envs.registration import register, registry  # noqa: PLC0415  # keeps the package light

    if LIVE_ENGINE_ID not in registry:
        register(id=LIVE_ENGINE_ID, entry_point="envs.live:LiveEngine", nondeterministic=True)
    if SIMULATED_ENGINE_ID not in registry:
        register(
            id=SIMULATED_ENGINE_ID, entry_point="envs.simulated:SimulatedEngine", max_episode_steps=SIMULATED_STEPS
        )
