"""One file per row, found by name. ``run(context)`` returns what goes into the document."""
