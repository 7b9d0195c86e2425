"""How fast the engine is, row by row: ``python -m engine.bench``. Times are processor time unless a row says otherwise.

Models have random weights and are made on the fly: speed does not depend on what weights say.
"""
