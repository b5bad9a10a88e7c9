"""A rank that serves requests: vLLM's scheduler, and the worker and model runner of vllm-ascend.

Scheduler, block pool, batches, block tables and attention metadata are the real ones, and so are
the op and the implementation's ``forward`` of every layer. What needs an NPU inside is replaced by
fakes that write and read the caches by the metadata that they are given.

What a token leaves in a cache tells its layer, its tensor, its number and its position, so a read
through a wrong block, or of one that belongs to another layer or to a past forward, is noticed.
"""

import types
from contextlib import contextmanager

import ascend_chain
from ascend_forward import StopLayerError, main_name

LAYERS = 4
BLOCK = ascend_chain.BLOCK_TOKENS
SAMPLED = 7
OUTPUT_TOKENS = 4
SHARED = [(11 * n + 3) % 97 + 1 for n in range(2 * BLOCK)]


def prompt(seed, tokens):
    """Tokens unlike those of other seeds."""
    return [(seed * 31 + 7 * n) % 89 + 100 for n in range(tokens)]


# Arrive one after the other, three steps apart. The third one's prompt has one token that is not in
# the prefix cache, the others' have many; the last two are long and together need more blocks than
# requests may hold at once.
PROMPTS = [
    SHARED + prompt(1, 44),
    SHARED + prompt(2, 200),
    SHARED + prompt(3, 1),
    prompt(4, 700),
    prompt(5, 600),
    SHARED + prompt(6, 30),
]


def value(layer, part, token, position):
    """What a token leaves: a whole number that bfloat16 holds."""
    return float((37 * layer + 11 * part + 3 * token + 5 * position) % 251 + 1)


def served(pipe, model, ranks, rank, port, options):
    """Serve ``PROMPTS``; send what was read and what was wrong about it."""
    chain = ascend_chain.start_rank(model, ranks, rank, port, options)
    log = {"wrong": [], "reads": 0, "steps": [], "proposed_from": []}
    with faked_operators(chain, log):
        finished = serve(chain, log)
    pipe.send(log | {"finished": finished, **counters(chain), **ascend_chain.describe(chain)})
    pipe.recv()


def counters(chain):
    counted = chain.worker._kvpp._engine.counters  # noqa: SLF001
    return {
        "broadcasts": counted.broadcasts,
        "moved_bytes": counted.sent_bytes + counted.received_bytes,
    }


def make_scheduler(chain):
    """vLLM's scheduler as its engine would make it."""
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
    from vllm.v1.structured_output import StructuredOutputManager

    config = chain.config
    config.cache_config.num_gpu_blocks = chain.cache_config.num_blocks
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=generate_scheduler_kv_cache_config([chain.cache_config]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )


def serve(chain, log):
    """Run all requests to their ends; how many tokens each has made."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.request import Request

    from kvpp_connect.seam.runtime import has_history

    init_none_hash(sha256)
    scheduler = make_scheduler(chain)
    log["scheduler"] = [base.__name__ for base in type(scheduler).__mro__]
    requests = [
        Request(
            request_id=str(number),
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        for number, tokens in enumerate(PROMPTS)
    ]
    waiting = list(requests)
    for step in range(200):
        if step % 3 == 0 and waiting:
            scheduler.add_request(waiting.pop(0))
        if not waiting and not scheduler.has_requests():
            break
        scheduled = scheduler.schedule()
        log["steps"].append(
            {"tokens": dict(scheduled.num_scheduled_tokens), "history": has_history(scheduled)}
        )
        output = chain.worker.execute_model(scheduled)
        if output is None:
            output = chain.worker.model_runner.sample_tokens(None)
        scheduler.update_from_output(scheduled, output)
        if chain.config.speculative_config is not None:
            drafts = [[SAMPLED] for _ in output.req_ids]
            scheduler.update_draft_token_ids(DraftTokenIds(output.req_ids, drafts))
    return {request.request_id: len(request.output_token_ids) for request in requests}


@contextmanager
def faked_operators(chain, log):
    """Fakes for what the runner and the layers cannot do without an NPU."""
    import pytest
    import torch
    from vllm.v1.outputs import SamplerOutput
    from vllm_ascend.attention.mla_v1 import AscendMLAImpl
    from vllm_ascend.attention.sfa_v1 import AscendSFAImpl
    from vllm_ascend.ops.mla import mla_forward
    from vllm_ascend.worker.block_table import BlockTable

    runner = chain.worker.model_runner
    caches = _Caches(chain, log)
    layers = {id(chain.layers[main_name(n)].impl): n for n in range(LAYERS)}

    def slot_mapping(table, requests, query_start, positions):
        lengths = query_start[1 : requests + 1] - query_start[:requests]
        rows = torch.arange(requests).repeat_interleave(lengths)
        blocks = table.block_table.gpu[rows, positions // BLOCK]
        found = table.slot_mapping.gpu
        found.fill_(-1)
        found[: len(positions)] = (blocks * BLOCK + positions % BLOCK).to(found.dtype)

    def run_model(tokens, *inputs, **more):
        del inputs, more
        log["steps"][-1]["blocks"] = caches.blocks()
        hidden = torch.zeros(tokens, 128, dtype=torch.bfloat16)
        for layer in range(LAYERS):
            try:
                mla_forward(hidden, False, hidden, f"model.layers.{layer}.self_attn")
            except StopLayerError:
                continue
        return hidden

    def preprocess(impl, layer_name, hidden_states, kv_cache, attn_metadata, gather):
        del layer_name, hidden_states, gather
        caches.write(layers[id(impl)], kv_cache, attn_metadata.slot_mapping)
        names = ("ql_nope", "q_pe", "q_nope", "k_nope", "k_pe", "value", "dequant_scale_q_nope")
        result = types.SimpleNamespace(**dict.fromkeys(names, kv_cache))
        return (
            result if attn_metadata.num_decodes else None,
            result if attn_metadata.num_prefills else None,
        )

    def attend(impl, tokens):
        return torch.zeros(tokens, impl.num_heads * impl.v_head_dim, dtype=torch.bfloat16)

    def forward_decode(impl, kv_cache, *arguments):
        metadata = arguments[4]
        rows = range(metadata.num_decodes)
        caches.read(layers[id(impl)], kv_cache, metadata.decode.block_table, rows)
        return attend(impl, metadata.num_decode_tokens)

    def forward_prefill(impl, kv_cache, *arguments):
        metadata = arguments[-1]
        rows = range(metadata.num_decodes, metadata.num_decodes + metadata.num_prefills)
        caches.read(layers[id(impl)], kv_cache, metadata.prefill.block_table, rows)
        return attend(impl, metadata.num_actual_tokens - metadata.num_decode_tokens)

    compose = AscendSFAImpl._compose_sfa_kv_cache  # noqa: SLF001 - its first access to caches

    def compose_and_stop(impl, kv_cache):
        from vllm.forward_context import get_forward_context

        layer = layers[id(impl)]
        metadata = get_forward_context().attn_metadata[main_name(layer)]
        composed = compose(impl, kv_cache)
        caches.write(layer, composed, metadata.slot_mapping)
        caches.read(layer, composed, metadata.block_table, range(metadata.block_table.shape[0]))
        raise StopLayerError

    def sample(logits, metadata):
        """One token for each request, and one more where its draft is accepted."""
        drafts = metadata.num_draft_tokens if metadata is not None else [0] * len(logits)
        rows = [[SAMPLED] + [SAMPLED if count else -1] * (max(drafts)) for count in drafts]
        tokens = torch.tensor(rows, dtype=torch.int32)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)

    def propose(*arguments):
        """The proposer finds its blocks by the numbers of the block pool."""
        log["proposed_from"].append(caches.has_pool_numbers(arguments[4]))
        return [[SAMPLED]] * runner.input_batch.num_reqs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", lambda self, *args: self)
        patch.setattr(torch, "zeros", _without_pinned_memory(torch.zeros))
        patch.setattr(BlockTable, "compute_slot_mapping", slot_mapping)
        patch.setattr(AscendMLAImpl, "_mla_preprocess", preprocess)
        patch.setattr(AscendMLAImpl, "_forward_decode", forward_decode)
        patch.setattr(AscendMLAImpl, "_forward_prefill", forward_prefill)
        patch.setattr(AscendSFAImpl, "_compose_sfa_kv_cache", compose_and_stop)
        patch.setattr(runner, "_model_forward", run_model)
        patch.setattr(runner.model, "compute_logits", lambda hidden: hidden, raising=False)
        patch.setattr(runner, "_sample", sample)
        patch.setattr(runner, "propose_draft_token_ids", propose)
        patch.setattr(runner, "_copy_draft_token_ids_to_cpu", lambda scheduled: None)
        for layer in range(LAYERS):
            impl = chain.layers[main_name(layer)].impl
            impl.__dict__["o_proj"] = lambda x, is_prefill=False: (
                torch.zeros(x.shape[0], 128, dtype=x.dtype),
            )
        yield


def _without_pinned_memory(make):
    def zeros(*args, pin_memory=False, **more):
        del pin_memory
        return make(*args, **more)

    return zeros


class _Caches:
    """Writes and reads of the batch that the runner has prepared."""

    def __init__(self, chain, log):
        self._runner = chain.worker.model_runner
        self._log = log

    def blocks(self):
        """Blocks that the batch refers to, by the numbers of the block pool."""
        batch = self._runner.input_batch
        lengths = self._runner.optimistic_seq_lens_cpu[: batch.num_reqs].tolist()
        table = batch.block_table[0].get_cpu_tensor()
        rows = [table[row, : -(-tokens // BLOCK)].tolist() for row, tokens in enumerate(lengths)]
        return sorted({block for row in rows for block in row})

    def has_pool_numbers(self, metadata):
        """Whether common attention metadata has them."""
        table = self._runner.input_batch.block_table[0]
        requests, tokens = metadata.num_reqs, metadata.num_actual_tokens
        return bool(
            (metadata.block_table_tensor[:requests] == table.block_table.gpu[:requests]).all()
            and (metadata.slot_mapping[:tokens] == table.slot_mapping.gpu[:tokens]).all()
        )

    def write(self, layer, caches, slots):
        """Each scheduled token leaves its values where the metadata says."""
        import torch

        batch = self._runner.input_batch
        starts = self._runner.query_start_loc.cpu[: batch.num_reqs + 1].tolist()
        positions = self._runner.positions[: starts[-1]].tolist()
        for row in range(batch.num_reqs):
            for index in range(starts[row], starts[row + 1]):
                token = int(batch.token_ids_cpu[row, positions[index]])
                slot = int(slots[index])
                for part, cache in enumerate(caches):
                    rows = cache.flatten(0, 1)
                    rows[slot] = torch.tensor(value(layer, part, token, positions[index]))

    def read(self, layer, caches, table, rows):
        """Every token of the requests is there, by the rows of a block table."""
        batch = self._runner.input_batch
        for number, row in enumerate(rows):
            length = int(self._runner.optimistic_seq_lens_cpu[row])
            blocks = table[number][: -(-length // BLOCK)].tolist()
            for part, cache in enumerate(caches):
                found = cache[blocks].flatten(0, 1)[:length].flatten(1)
                right = [
                    value(layer, part, int(batch.token_ids_cpu[row, position]), position)
                    for position in range(length)
                ]
                values = [found.amin(1).tolist(), found.amax(1).tolist()]
                self._log["reads"] += 1
                if values != [right, right]:
                    self._log["wrong"].append((layer, part, batch.req_ids[row]))
