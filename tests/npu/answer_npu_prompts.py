"""Print the tokens of one engine on NPUs, as JSON: a process of its own for each engine.

    python answer_npu_prompts.py MODEL '{"tensor_parallel_size": 2, ...}'

Every prompt is asked twice: the second time its blocks are in the prefix cache.
"""

import json
import sys
from random import Random


def main():
    from vllm import LLM, SamplingParams

    model, settings = sys.argv[1], json.loads(sys.argv[2])
    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_batched_tokens=256,  # long prompts come in pieces
        gpu_memory_utilization=0.6,
        enable_prefix_caching=True,
        **settings,
    )
    random = Random("prompts")
    prompts = [
        {"prompt_token_ids": [random.randrange(5, 250) for _ in range(length)]}
        for length in (7, 128, 129, 300, 700, 1500)
    ]
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    tokens = [
        [list(answer.outputs[0].token_ids) for answer in engine.generate(prompts, greedy)]
        for _ in range(2)
    ]
    print("> " + json.dumps(tokens))


if __name__ == "__main__":
    main()
