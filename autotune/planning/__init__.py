"""What a model needs and what a machine holds of it, worked out before anything runs."""
