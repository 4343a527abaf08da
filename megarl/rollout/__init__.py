"""Sampling: engines, the fleet of them, and the client that fills experiences from them."""
