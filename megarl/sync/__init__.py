"""Trainer weights to engine weights.

`publish` drives an update from all trainers, over a transport: `device` (where buckets must lie), `push(bucket)`,
`finish()`, `close(urls)`, `abandon()`. There is one, `broadcast`. `checksum` is what both sides compare.
"""
