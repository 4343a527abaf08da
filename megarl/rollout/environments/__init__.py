"""Environments: conversations of several turns, with tools, that a model is trained in. See docs/environments.md."""
