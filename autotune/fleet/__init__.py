"""Many engines and daemons at once, as one Prometheus sees them."""
