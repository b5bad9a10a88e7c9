"""Stands for the broadcast engine where hooks are tested."""


class NotingEngine:
    """The engine's states, without bytes; notes every call."""

    def __init__(self, log, *, armed=False):
        self.log = log
        self.armed = armed
        self.held = None

    def acquire(self, ordinal):
        self.log.append(("acquire", ordinal))
        self.held = ordinal

    def release(self, ordinal):
        self.log.append(("release", ordinal))
        self.held = None

    def finish(self):
        self.log.append("finish")
        self.armed = False

    def abandon(self, reason):
        self.log.append(("abandon", reason))
