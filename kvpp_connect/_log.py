"""Loggers below vLLM's own, the only one that vLLM gives a handler."""

import logging


def get_logger(name: str) -> logging.Logger:
    """Return the logger ``vllm.<name>``; ``name`` is the caller's ``__name__``."""
    return logging.getLogger(f"vllm.{name}")
