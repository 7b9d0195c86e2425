"""Engines other than ours, and ours, behind one interface. Importing it loads nothing."""
