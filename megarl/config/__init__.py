"""Typed configuration: `schema` (the tree), `layout` (parallel degrees), `load` (YAML, overrides), `check`."""
