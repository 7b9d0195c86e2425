"""One file per row: ``KEYS: tuple[str, ...]`` and ``run(context: Context) -> dict[str, object]``."""
