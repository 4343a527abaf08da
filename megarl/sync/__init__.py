"""Trainer weights to engine weights.

`publish.WeightPublisher` drives an update from all trainers: to which engines (`sets`), together with the other
trainers (`crew`), by one of the transports behind `transport.Transport` (`choose`): `broadcast`, `disk` or
`delta_transport`, whose messages `delta` makes and reads. `checksum` is what both sides compare, `verify` does.
"""
