"""kvpp-connect: owner-only KV cache layout for vLLM, and KV transfer that understands it."""

__version__ = "0.1.0"
