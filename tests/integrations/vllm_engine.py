"""The engines of the vLLM tests, one after the other in a process of their own.

    python vllm_engine.py '{"model": "folder", "engines": {"name": {"weft": {...}, ...}, ...}}'

Each prints a line of JSON: the tokens of all requests, and what its workers reported.
Requests of unlike lengths arrive while others are under way, at the same steps in every engine.
Two of them begin alike and arrive together: with prefix caching one reads what the other writes.
With "swap" the parts of every other cut step get each other's attention metadata.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

MARK = "@tokens "
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "HF_HUB_OFFLINE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    "GLOO_SOCKET_IFNAME": "lo", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
NUM_REQUESTS, NUM_NEW, BLOCK, MAX_LENGTH = 18, 32, 32, 256


def prompt(number: int) -> list[int]:
    """Unlike lengths, from 3 to 87 tokens; 4 and 5 begin with the same block."""
    if number in (4, 5):
        return [(7 * at) % 900 + 3 for at in range(BLOCK)] + [11 + number] * (3 + number)
    length = 3 + (37 * number) % 85
    return [(131 * number + 17 * at) % 950 + 3 for at in range(length)]


def arrivals(step: int) -> range:
    """Three requests at first, then three more every other step."""
    first = 3 * step // 2
    return range(first, first + 3) if step % 2 == 0 and first < NUM_REQUESTS else range(0)


def run(engine, params) -> list[list[int]]:
    """The new tokens of every request."""
    found: dict[str, list[int]] = {}
    step = 0
    while len(found) < NUM_REQUESTS:
        for number in arrivals(step):
            engine.add_request(str(number), {"prompt_token_ids": prompt(number)}, params)
        for output in engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    return [found[str(number)] for number in range(NUM_REQUESTS)]


def swap(worker) -> None:
    """Let the parts of every other cut step of equal parts get each other's metadata."""
    session = worker.vllm_config.weft.session
    plain = session.options.splitters[0].fields["attn_metadata"]
    count = [0]

    def swapped(value, parts):
        found = plain(value, parts)
        count[0] += 1
        sizes = {stop - start for start, stop in parts.rows}
        return found[::-1] if count[0] % 2 and len(sizes) == 1 else found

    for piece in session.pieces:
        fields = {**piece.splitters[0].fields, "attn_metadata": swapped}
        piece.splitters = (replace(piece.splitters[0], fields=fields),)


def told_by(llm, *, swaps: bool) -> dict:
    """What an engine makes of the requests."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True, detokenize=False, temperature=0)
    told = {"tokens": run(llm.llm_engine, params)}
    if llm.llm_engine.vllm_config.additional_config:
        told["reports"] = llm.collective_rpc("weft_report")
    if swaps:
        llm.reset_prefix_cache()
        llm.collective_rpc(swap)
        told["swapped"] = run(llm.llm_engine, params)
    return told


def main(model: str, engines: dict[str, dict]) -> None:
    from vllm import LLM

    for name, spec in engines.items():
        stock = spec["weft"] is None
        more = {} if stock else {"additional_config": {"weft": spec["weft"]}}
        llm = LLM(
            model, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_LENGTH,
            tensor_parallel_size=2, block_size=BLOCK, max_num_seqs=12, enforce_eager=stock,
            enable_chunked_prefill=spec["chunked"], enable_prefix_caching=spec["prefix"],
            max_num_batched_tokens=96 if spec["chunked"] else MAX_LENGTH, **more,
        )  # fmt: skip
        told = told_by(llm, swaps=spec.get("swap", False))
        sys.stdout.write(f"\n{MARK}{json.dumps({name: told}, default=str)}\n")
        sys.stdout.flush()
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    # The engine lives in this process and only its workers in others: that saves a start.
    os.environ |= {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    main(**json.loads(sys.argv[1]))
