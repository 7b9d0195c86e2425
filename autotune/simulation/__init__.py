"""Policies on simulated traffic: what they would have done, and what it would have been worth."""
