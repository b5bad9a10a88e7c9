"""Tokens of a vLLM engine on a device, each engine in a process of its own.

    python device_answers.py MODEL '{"tensor_parallel_size": 2, ...}'

prints them as JSON behind a mark. Every prompt is asked twice: the second time its blocks are in
the prefix cache.
"""

import json
import os
import subprocess
import sys
from random import Random

MARK = "> "
# Around blocks of 64 and of 128 tokens, and longer than a step takes.
LENGTHS = (7, 64, 65, 128, 129, 300, 700, 1500)


def ask_engine(model, settings, environment, timeout_s):
    """The tokens of an engine with these settings, in both rounds."""
    done = subprocess.run(
        [sys.executable, __file__, str(model), json.dumps(settings)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    return json.loads(line.removeprefix(MARK))


def main(model, settings):
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_batched_tokens=256,  # long prompts come in pieces
        gpu_memory_utilization=0.5,
        enable_prefix_caching=True,
        **settings,
    )
    random = Random("prompts")
    prompts = [
        {"prompt_token_ids": [random.randrange(5, 250) for _ in range(length)]}
        for length in LENGTHS
    ]
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    rounds = [engine.generate(prompts, greedy) for _ in range(2)]
    tokens = [[list(answer.outputs[0].token_ids) for answer in answers] for answers in rounds]
    print(f"{MARK}{json.dumps(tokens)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
