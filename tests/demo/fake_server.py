"""A tiny stand-in for a vLLM server, run as a program: python fake_server.py PORT KEY=VALUE...

mode=ok | crash | silent   answers / ends with a traceback / never becomes healthy
term=obey | ignore         what SIGTERM does
child=1                    starts a child that ignores SIGTERM and outlives its parent
pids=FILE                  appends the ids of its processes
shm=FILE                   makes shared memory, writes its name to the file, never removes it
kv_tokens=N                what the log says about the KV cache
salt=TEXT                  changes the answers
pull=0 | 1                 serves pull counters that count each prompt token
computes=1                 serves vLLM's counter of prompt tokens that were computed: all
die_after=N                ends with exit code 3 after N completions
after=FILE                 does not crash before something is in this file
log=TEXT                   one more line in the log
delay_s=N                  seconds before a completion is answered; notes its id in FILE.requests
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

BYTES_PER_TOKEN = 6 * 576 * 4
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
TRACEBACK = """\
(Worker_TP0 pid=6) ERROR 11-30 03:37:17 [multiproc_executor.py:953] RuntimeError: no such layout
(EngineCore pid=5) ERROR 11-30 03:37:19 [core.py:1510] Exception: WorkerProc initialization \
failed due to an exception in a background process. See stack trace for root cause.
"""


def main() -> int:
    port = int(sys.argv[1])
    options = dict(word.split("=", 1) for word in sys.argv[2:])
    pids = [os.getpid()]
    if options.get("term") == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.get("child"):
        pids.append(subprocess.Popen([sys.executable, "-c", STUBBORN]).pid)
    if "pids" in options:
        with open(options["pids"], "a") as file:
            file.write("".join(f"{pid}\n" for pid in pids))
    if "shm" in options:
        memory = SharedMemory(create=True, size=1000)
        Path(options["shm"]).write_text(memory.name)
    if options.get("mode") == "crash":
        after = Path(options["after"]) if "after" in options else None
        while after is not None and not (after.exists() and after.read_text()):
            time.sleep(0.02)
        print(TRACEBACK, flush=True)
        return 7
    if options.get("mode") == "silent":
        print("loading weights", flush=True)
        time.sleep(300)
    tokens = int(options.get("kv_tokens", "14464"))
    print(f"(EngineCore pid=5) INFO 11-30 03:37:19 [u.py:1] CPU KV cache size: {tokens:,} tokens")
    print(options.get("log", ""))
    if "FAKE_FOLDER" in os.environ:
        Path(os.environ["FAKE_FOLDER"], "socket").touch()
    print("scratch name fake_scratch_0123", flush=True)
    Handler.options = options
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
    return 0


class Handler(BaseHTTPRequestHandler):
    options: dict[str, str]
    lock = threading.Lock()
    completions = 0
    prompt_tokens = 0

    def do_GET(self):
        text = "ok"
        if self.path == "/metrics" and self.options.get("pull") == "1":
            tokens = Handler.prompt_tokens
            text = (
                "# TYPE vllm:kvpp_pull_bytes_total counter\n"
                f'vllm:kvpp_pull_bytes_total{{engine="0",rank="0"}} {tokens * BYTES_PER_TOKEN}\n'
                f'vllm:kvpp_pull_tokens_total{{engine="0",rank="0"}} {float(tokens)}\n'
            )
        if self.path == "/metrics" and self.options.get("computes"):
            name = "vllm:request_prefill_kv_computed_tokens_sum"
            text = f'{name}{{engine="0"}} {float(Handler.prompt_tokens)}\n'
        self._answer(text.encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with Handler.lock:
            Handler.completions += 1
            Handler.prompt_tokens += len(body["prompt"])
            if Handler.completions > int(self.options.get("die_after", "1000")):
                os._exit(3)
        if "delay_s" in self.options:
            with open(self.options["pids"] + ".requests", "a") as file:
                file.write(f"{Handler.completions}\n")
            time.sleep(float(self.options["delay_s"]))
        seed = f"{body['prompt']}{self.options.get('salt', '')}"
        ids = list(hashlib.sha512(seed.encode()).digest()[: body["max_tokens"]])
        answer = {
            "choices": [{"token_ids": ids}],
            "usage": {"prompt_tokens": len(body["prompt"])},
        }
        self._answer(json.dumps(answer).encode())

    def _answer(self, data: bytes):
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    sys.exit(main())
