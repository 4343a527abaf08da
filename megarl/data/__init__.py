"""Prompts, samples, packing: from files to packed micro-batches."""
