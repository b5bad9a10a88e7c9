"""Child processes of the distributed tests."""

import multiprocessing
import traceback


def _child(function, pipe, arguments):
    try:
        function(pipe, *arguments)
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        raise


class Child:
    """A process that runs ``function(pipe, *arguments)``; ``get`` raises what it raised."""

    def __init__(self, function, *arguments):
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(
            target=_child, args=(function, other, arguments), daemon=True
        )
        self.process.start()
        other.close()

    def get(self, timeout_s=60):
        if not self.pipe.poll(timeout_s):
            raise TimeoutError(f"no message from pid {self.process.pid} in {timeout_s} s")
        message = self.pipe.recv()
        if isinstance(message, tuple) and message and message[0] == "error":
            raise AssertionError(message[1])
        return message

    def put(self, message):
        self.pipe.send(message)

    def kill(self):
        self.process.kill()
        self.process.join(10)
