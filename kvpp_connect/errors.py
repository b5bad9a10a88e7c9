"""The exceptions that users and peers see."""


class KvppError(Exception):
    """Base of every error that kvpp-connect raises on purpose."""


class ConfigError(KvppError):
    """A setting that cannot work."""


class LayoutError(KvppError):
    """A cache layout that cannot be planned."""


class PeerError(KvppError):
    """A peer that fails or does not fit."""


class SeamError(KvppError):
    """A vLLM that does not fit the seam."""
