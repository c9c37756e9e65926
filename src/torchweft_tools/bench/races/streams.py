"""Races by a missing edge: two streams touch the same bytes, and nothing orders them."""

from __future__ import annotations

from torchweft_tools.bench.races.known_race import KnownRace

DUAL_BATCH = """
    attn      x -> h
    dispatch  h -> r all_to_all@ep
    experts   r -> m
    combine   m -> y all_to_all@ep
"""
LATE_EVENT = """
    compute  split x
    compute  attn[0]
    compute  attn[1]
    comm     wait attn[1]
    comm     dispatch[0]
    comm     dispatch[1]
    compute  wait dispatch[0]
    compute  experts[0]
    compute  wait dispatch[1]
    compute  experts[1]
    comm     wait experts[1]
    comm     combine[0]
    comm     combine[1]
    compute  wait combine[1]
    compute  merge y
"""

STREAMS = (
    KnownRace(
        thread="vllm-project/vllm#52033",
        wrong="The routed experts write their result over the hidden states, in place, while the "
        "shared expert still reads them on a second stream: without a quantised copy both have "
        "one tensor.",
        cure="One stream, unless the input of the routed experts is quantised and so a copy.",
        rule="race",
        ops=("""
            norm    x -> h
            shared  h -> s
            routed  h -> - mutates h
            add     h,s -> y
        """,),
        lanes="main on gpu; aux on gpu",
        broken=("""
            main  norm
            aux   wait norm
            aux   shared
            main  routed
            main  wait shared
            main  add
        """,),
        mended=("""
            main  norm
            main  shared
            main  routed
            main  add
        """,),
    ),
    KnownRace(
        thread="vllm-project/vllm#27666",
        wrong="Two micro-batches: the all-to-all library orders its stream behind the current one, "
        "which is by then the stream for communication, so dispatch and combine may start before "
        "their input is computed.",
        cure="An event is captured on the compute stream and handed to dispatch and combine; taken "
        "late, it covers the other micro-batch too (see #38451).",
        rule="race",
        ops=(DUAL_BATCH,) * 2,
        lanes="compute on gpu; comm on gpu",
        places="place y alone",
        parts="1/2 1/2",
        broken=("""
            compute  split x
            compute  attn[0]
            comm     dispatch[0]
            compute  attn[1]
            comm     dispatch[1]
            compute  wait dispatch[0]
            compute  experts[0]
            comm     combine[0]
            compute  wait dispatch[1]
            compute  experts[1]
            comm     combine[1]
            compute  wait combine[1]
            compute  merge y
        """,) * 2,
        mended=(LATE_EVENT,) * 2,
    ),
    KnownRace(
        thread="vllm-project/vllm#38451",
        wrong="The event above is captured after the yield, so it covers the other micro-batch: "
        "dispatch[0] waits for attn[1], and nothing overlaps any more.",
        cure="The event is captured before the yield: dispatch[0] waits for attn[0].",
        rule=None,
        why_not="The broken form is safe: an edge too many costs time, not numbers. The simulator "
        "and a trace show it; verify rightly accepts it.",
        ops=(DUAL_BATCH,) * 2,
        lanes="compute on gpu; comm on gpu",
        places="place y alone",
        parts="1/2 1/2",
        broken=(LATE_EVENT,) * 2,
        mended=("""
            compute  split x
            compute  attn[0]
            comm     wait attn[0]
            comm     dispatch[0]
            compute  attn[1]
            comm     wait attn[1]
            comm     dispatch[1]
            compute  wait dispatch[0]
            compute  experts[0]
            comm     wait experts[0]
            comm     combine[0]
            compute  wait dispatch[1]
            compute  experts[1]
            comm     wait experts[1]
            comm     combine[1]
            compute  wait combine[1]
            compute  merge y
        """,) * 2,
    ),
    KnownRace(
        thread="sgl-project/sglang#26380",
        wrong="The scheduler runs one batch ahead: it writes the next batch's rows into the shared "
        "table of token slots while the forward pass of the last batch still reads it.",
        cure="The schedule stream waits for the forward stream before it writes.",
        rule="race",
        ops=("""
            prepare0  batch0 -> - mutates slots
            forward0  slots -> y0
            prepare1  batch1 -> - mutates slots
            forward1  slots -> y1
        """,),
        lanes="schedule on gpu; forward on gpu",
        broken=("""
            schedule  prepare0
            forward   wait prepare0
            forward   forward0
            schedule  prepare1
            forward   wait prepare1
            forward   forward1
        """,),
        mended=("""
            schedule  prepare0
            forward   wait prepare0
            forward   forward0
            schedule  wait forward0
            schedule  prepare1
            forward   wait prepare1
            forward   forward1
        """,),
    ),
    KnownRace(
        thread="vllm-project/vllm#46278",
        wrong="KV blocks are copied to the host on a stream of their own, which does not wait for "
        "the attention that is still writing them.",
        cure="The copy waits for an event recorded behind the compute of the step.",
        rule="race",
        ops=("""
            attend  q,kv -> y mutates kv
            keep    kv -> saved
        """,),
        lanes="compute on gpu; store on gpu; host on cpu",
        broken=("""
            compute  attend
            store    copy kv to cpu
            host     wait copy kv to cpu
            host     keep
        """,),
        mended=("""
            compute  attend
            store    wait attend
            store    copy kv to cpu
            host     wait copy kv to cpu
            host     keep
        """,),
    ),
    KnownRace(
        thread="vllm-project/vllm#47282",
        wrong="A freed KV block is loaded with another request's keys while the attention of the "
        "request that had it still reads it: loads wait for nothing on the compute stream.",
        cure="Loads wait for the same event as stores (#47291, #47324).",
        rule="race",
        ops=("""
            old   q0,block -> y0
            load  saved -> - mutates block
            new   q1,block -> y1
        """,),
        lanes="compute on gpu; transfer on gpu",
        broken=("""
            compute   old
            transfer  load
            compute   wait load
            compute   new
        """,),
        mended=("""
            compute   old
            transfer  wait old
            transfer  load
            compute   wait load
            compute   new
        """,),
    ),
    KnownRace(
        thread="cornstarch-org/Cornstarch#77",
        wrong="Backward of context-parallel attention: the reduce-scatter of the side stream reads "
        "the gradient before it is written, and its result is cloned before it has landed.",
        cure="The side stream waits for the producer; the clone waits for an event behind the "
        "reduce-scatter.",
        rule="race",
        ops=("""
            backward  dout -> dgkv
            scatter   dgkv -> dkv reduce_scatter@cp
            clone     dkv -> grad
        """,) * 2,
        lanes="default on gpu; side on gpu",
        broken=("""
            default  backward
            side     scatter
            default  clone
        """,) * 2,
        mended=("""
            default  backward
            side     wait backward
            side     scatter
            default  wait scatter
            default  clone
        """,) * 2,
    ),
    KnownRace(
        thread="OpenNMT/OpenNMT-py#2295",
        wrong="all_reduce(buffer, async_op=True), then buffer.div_(): the handle is dropped and "
        "nobody waits, so the division may come before the sum.",
        cure="The call blocks (async_op=False).",
        rule="coverage",
        ops=("""
            reduce   - -> - mutates grads all_reduce@dp two-phase
            rescale  - -> - mutates grads
        """,) * 2,
        lanes="compute on gpu; nccl on gpu via compute",
        broken=("""
            compute  issue reduce on nccl
            compute  rescale
        """,) * 2,
        mended=("""
            compute  issue reduce on nccl
            compute  complete reduce
            compute  rescale
        """,) * 2,
    ),
)  # fmt: skip
