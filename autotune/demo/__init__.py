"""The demonstration behind ``make run``: engine, daemon and load on the bundled model, with and without tuning."""
