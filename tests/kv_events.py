"""Listens to a server's KV events as a router does."""

import threading

import msgspec
import zmq


class KvEvents:
    """Events about blocks that lie in a store, from the moment on when it is entered."""

    def __init__(self, endpoint):
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._stored, self._removed = [], []

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._closing.set()
        self._thread.join(10)
        self._socket.close()

    def stored(self):
        """Names of stored blocks, as often as they were told."""
        return [name for event in self._stored for name in event["block_hashes"]]

    def removed(self):
        """Names of removed blocks."""
        return [name for event in self._removed for name in event["block_hashes"]]

    def assert_chains(self):
        """Each block once, behind its parent, with its own tokens."""
        told = self.stored()
        assert len(set(told)) == len(told)
        for event in self._stored:
            assert len(event["token_ids"]) == event["block_size"] == 16
            parent = event["parent_block_hash"]
            assert parent is None or parent in told
        assert [event["parent_block_hash"] for event in self._stored].count(None) == 1

    def _listen(self):
        while not self._closing.is_set():
            if not self._socket.poll(100):
                continue
            _, events, *_ = msgspec.msgpack.decode(self._socket.recv_multipart()[-1])
            for event in events:
                if event.get("medium") == "STORAGE":
                    kind = self._stored if event["type"] == "BlockStored" else self._removed
                    kind.append(event)
