"""Training of policies by reinforcement (extra ``train``): torch and Stable-Baselines3 are imported in here alone."""
