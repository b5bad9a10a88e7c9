"""Arithmetic before a launch, from a checkpoint's config.json: standard library only, no device.

The rules are vLLM's own, read in the release that ``seam.ledger`` supports; ``kvpp audit --verify``
compares them with the vLLM that is installed.
"""
