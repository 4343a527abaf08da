"""How a response is scored: a registry of reward functions, and worker processes that run them."""
