"""Races for bytes: two values in one place, or bytes given back while someone still reads them."""

from __future__ import annotations

from torchweft_tools.bench.races.known_race import KnownRace

BUFFERS = (
    KnownRace(
        thread="pytorch/torchtitan#3955",
        wrong="Dispatch outputs live in one static symmetric buffer, but the op says nothing of "
        "it: the scheduler moves the next dispatch ahead of the experts that still read the last.",
        cure="The experts' output of a buffer's last use is an input of its next dispatch.",
        rule="race",
        ops=("""
            dispatch0  x -> r0 all_to_all@ep
            experts0   r0 -> y0
            dispatch1  x -> r1 all_to_all@ep
            experts1   r1 -> y1
        """,) * 2,
        lanes="compute on gpu; comm on gpu",
        places="""
            buffer symmetric on gpu unit 4
            place r0 in symmetric at 0
            place r1 in symmetric at 0
        """,
        broken=("""
            comm     dispatch0
            comm     dispatch1
            compute  wait dispatch0
            compute  experts0
            compute  wait dispatch1
            compute  experts1
        """,) * 2,
        mended=("""
            comm     dispatch0
            compute  wait dispatch0
            compute  experts0
            comm     wait experts0
            comm     dispatch1
            compute  wait dispatch1
            compute  experts1
        """,) * 2,
    ),
    KnownRace(
        thread="deepspeedai/DeepSpeed#5606",
        wrong="Two buffers for gradients take turns, and the third bucket is filled into the first "
        "one without asking whether its reduction has ended.",
        cure="Where the reduction waits for a bucket, compute waits for the reduction before it.",
        rule="race",
        ops=("""
            fill0    g0 -> b0
            reduce0  b0 -> r0 all_reduce@dp
            fill1    g1 -> b1
            reduce1  b1 -> r1 all_reduce@dp
            fill2    g2 -> b2
            reduce2  b2 -> r2 all_reduce@dp
        """,) * 2,
        lanes="default on gpu; reduction on gpu",
        places="""
            buffer ipg on gpu unit 4
            place b0 in ipg at 0
            place b1 in ipg at 1
            place b2 in ipg at 0
        """,
        broken=("""
            default    fill0
            reduction  wait fill0
            reduction  reduce0
            default    fill1
            reduction  wait fill1
            reduction  reduce1
            default    fill2
            reduction  wait fill2
            reduction  reduce2
        """,) * 2,
        mended=("""
            default    fill0
            reduction  wait fill0
            reduction  reduce0
            default    fill1
            default    wait reduce0
            reduction  wait fill1
            reduction  reduce1
            default    fill2
            default    wait reduce1
            reduction  wait fill2
            reduction  reduce2
        """,) * 2,
    ),
    KnownRace(
        thread="deepspeedai/DeepSpeed#8061",
        wrong="Gradients are copied into one bucket from several streams of a compiled backward; "
        "the reduction waits for the current one only.",
        cure="The bucket remembers the streams that wrote to it; the reduction waits for all.",
        rule="race",
        ops=("""
            copy_a  grad_a -> a
            copy_b  grad_b -> b
            reduce  a,b -> mean all_reduce@dp
        """,) * 2,
        lanes="first on gpu; current on gpu; reduction on gpu",
        places="""
            buffer bucket on gpu unit 4
            place a in bucket at 0
            place b in bucket at 1
        """,
        broken=("""
            first      copy_a
            current    copy_b
            reduction  wait copy_b
            reduction  reduce
        """,) * 2,
        mended=("""
            first      copy_a
            current    copy_b
            reduction  wait copy_a
            reduction  wait copy_b
            reduction  reduce
        """,) * 2,
    ),
    KnownRace(
        thread="NVIDIA/TensorRT-LLM#15546",
        wrong="Block offsets go to the device by an asynchronous copy out of one pinned buffer, "
        "which the host, a batch ahead, overwrites before the copy has run.",
        cure="A fresh host buffer for every batch.",
        rule="race",
        ops=("""
            fill0  blocks0 -> offsets0
            attn0  offsets0 -> y0
            fill1  blocks1 -> offsets1
            attn1  offsets1 -> y1
        """,),
        lanes="host on cpu; h2d on cpu; forward on gpu",
        places="""
            buffer pinned on cpu unit 4
            place offsets0 in pinned at 0
            place offsets1 in pinned at 0
        """,
        mended_places="",
        broken=(offsets := """
            host     fill0
            h2d      wait fill0
            h2d      copy offsets0 to gpu
            host     fill1
            h2d      wait fill1
            h2d      copy offsets1 to gpu
            forward  wait copy offsets0 to gpu
            forward  attn0
            forward  wait copy offsets1 to gpu
            forward  attn1
        """,),
        mended=(offsets,),
    ),
    KnownRace(
        thread="NVIDIA/TensorRT-LLM#7940",
        wrong="Two chunks of a mixture of experts run on two streams, and the op hands both the "
        "same workspace.",
        cure="A workspace for each stream.",
        rule="race",
        ops=("""
            up0    x0 -> work0
            down0  work0 -> y0
            up1    x1 -> work1
            down1  work1 -> y1
        """,),
        lanes="main on gpu; aux on gpu",
        places="""
            buffer workspace on gpu unit 4
            place work0 in workspace at 0
            place work1 in workspace at 0
        """,
        mended_places="""
            buffer workspace on gpu unit 4
            place work0 in workspace at 0
            place work1 in workspace at 1
        """,
        broken=(chunks := """
            main  up0
            main  down0
            aux   up1
            aux   down1
        """,),
        mended=(chunks,),
    ),
    KnownRace(
        thread="vllm-project/vllm#50729",
        wrong="A convolution state is shifted within its block by a parallel copy: one group of "
        "threads overwrites a token that another has not moved yet.",
        cure="Tokens of an overlapping move are copied in order, low to high.",
        rule="race",
        ops=("""
            conv   x -> t0,t1,t2
            use    t0,t1,t2 -> y
            move0  t1 -> n0
            move1  t2 -> n1
            next   n0,n1 -> z
        """,),
        lanes="warp0 on gpu; warp1 on gpu",
        places="""
            buffer block on gpu unit 4
            place t0 in block at 0
            place t1 in block at 1
            place t2 in block at 2
            place n0 in block at 0
            place n1 in block at 1
        """,
        broken=("""
            warp0  conv
            warp0  use
            warp0  move0
            warp1  wait use
            warp1  move1
            warp0  wait move1
            warp0  next
        """,),
        mended=("""
            warp0  conv
            warp0  use
            warp0  move0
            warp0  move1
            warp0  next
        """,),
    ),
    KnownRace(
        thread="vllm-project/vllm#54975",
        wrong="Weights of three modules take turns in two slots; after module 1 the prefetch goes "
        "on with module 0, whose slot module 2, not yet run, still needs.",
        cure="The slot that became free is refilled for a module that owns it: module 0 comes "
        "behind module 2.",
        rule="race",
        ops=("""
            load0  host0 -> w0
            load1  host1 -> w1
            run0   x,w0 -> h0
            load2  host2 -> w2
            run1   h0,w1 -> h1
            run2   h1,w2 -> y
            again  host0 -> v0
            next   y,v0 -> z
        """,),
        lanes="compute on gpu; prefetch on gpu",
        places="""
            buffer slots on gpu unit 4
            place w0 in slots at 0
            place w1 in slots at 1
            place w2 in slots at 0
            place v0 in slots at 0
        """,
        broken=("""
            prefetch  load0
            prefetch  load1
            compute   wait load0
            compute   run0
            prefetch  wait run0
            prefetch  load2
            compute   wait load1
            compute   run1
            prefetch  wait run1
            prefetch  again
            compute   wait load2
            compute   run2
            compute   wait again
            compute   next
        """,),
        mended=("""
            prefetch  load0
            prefetch  load1
            compute   wait load0
            compute   run0
            prefetch  wait run0
            prefetch  load2
            compute   wait load1
            compute   run1
            compute   wait load2
            compute   run2
            prefetch  wait run2
            prefetch  again
            compute   wait again
            compute   next
        """,),
    ),
    KnownRace(
        thread="meta-pytorch/torchrec#4231",
        wrong="An activation is copied to the host on a side stream and its storage released at "
        "once; the allocator gives the bytes to the next tensor of the default stream.",
        cure="record_stream: the bytes are kept from reuse until the copy has ended.",
        rule="race",
        ops=("""
            forward   x -> act
            stash     act -> host
            loss      x -> tmp
            backward  host,tmp -> grad
        """,),
        lanes="default on gpu; d2h on gpu",
        places="""
            buffer cache on gpu unit 4
            place act in cache at 0
            place tmp in cache at 0
        """,
        mended_places="""
            buffer cache on gpu unit 4
            place act in cache at 0
            place tmp in cache at 1
        """,
        broken=(stashed := """
            default  forward
            d2h      wait forward
            d2h      stash
            default  loss
            default  wait stash
            default  backward
        """,),
        mended=(stashed,),
    ),
    KnownRace(
        thread="NVIDIA/Megatron-LM#5788",
        wrong="The storage of gathered weights is resized to nothing on the stream that gathered "
        "them, while the layer that uses them still runs on the compute stream.",
        cure="The storage is given back behind an event of its consumer (#5719).",
        rule="race",
        ops=("""
            gather   shard -> weight all_gather@dp
            forward  x,weight -> y
        """,) * 2,
        lanes="compute on gpu; comm on gpu",
        broken=("""
            comm     gather
            compute  wait gather
            compute  forward
            comm     free weight
        """,) * 2,
        mended=("""
            comm     gather
            compute  wait gather
            compute  forward
            comm     wait forward
            comm     free weight
        """,) * 2,
    ),
    KnownRace(
        thread="ROCm/ATOM#1369",
        wrong="Two micro-batches: the last reference to the input of a collective is dropped when "
        "the thread changes streams, and the allocator recycles it while peers still read it.",
        cure="Each micro-batch holds inputs and outputs of its collectives until it has waited "
        "for them.",
        rule="race",
        ops=("""
            attn    x -> h
            gather  h -> g all_gather@dp
            moe     g -> y
        """,) * 2,
        lanes="compute on gpu; comm on gpu",
        places="place y alone",
        parts="1/2 1/2",
        broken=("""
            compute  split x
            compute  attn[0]
            comm     wait attn[0]
            comm     gather[0]
            compute  free h[0]
            compute  attn[1]
            comm     wait attn[1]
            comm     gather[1]
            compute  free h[1]
            compute  wait gather[0]
            compute  moe[0]
            compute  wait gather[1]
            compute  moe[1]
            compute  merge y
        """,) * 2,
        mended=("""
            compute  split x
            compute  attn[0]
            comm     wait attn[0]
            comm     gather[0]
            compute  attn[1]
            comm     wait attn[1]
            comm     gather[1]
            compute  wait gather[0]
            compute  free h[0]
            compute  moe[0]
            compute  wait gather[1]
            compute  free h[1]
            compute  moe[1]
            compute  merge y
        """,) * 2,
    ),
    KnownRace(
        thread="sgl-project/sglang#32188",
        wrong="A layout change hands back an alias that does not own its bytes; the only "
        "reference to the scales is rebound to it, so they are freed before the GEMM reads them.",
        cure="Where nothing has to change the tensor itself is handed back, and lives on.",
        rule="memory",
        ops=("""
            quant  x -> q,scale
            align  scale -> aligned=scale
            gemm   q,aligned -> y
        """,),
        lanes="compute on gpu",
        broken=("""
            compute  quant
            compute  align
            compute  free scale
            compute  gemm
        """,),
        mended=("""
            compute  quant
            compute  align
            compute  gemm
            compute  free scale
        """,),
    ),
    KnownRace(
        thread="NVIDIA/Megatron-LM#4609",
        wrong="The buffer of gradients also receives gathered parameters; backward then adds to "
        "what they left there instead of to zeros.",
        cure="The buffer is zeroed again once the parameters have been copied out of it.",
        rule="memory",
        ops=("""
            zero      - -> grads
            gather    shard -> full all_gather@dp two-phase
            copy_out  full -> - mutates params
            backward  x,params -> - mutates grads
            step      grads -> update
        """,) * 2,
        lanes="compute on gpu; nccl on gpu via compute",
        places="""
            buffer bucket on gpu unit 4
            place grads in bucket at 0
            place full in bucket at 0
        """,
        broken=("""
            compute  zero
            compute  issue gather on nccl
            compute  complete gather
            compute  copy_out
            compute  backward
            compute  step
        """,) * 2,
        mended=("""
            compute  issue gather on nccl
            compute  complete gather
            compute  copy_out
            compute  zero
            compute  backward
            compute  step
        """,) * 2,
    ),
    KnownRace(
        thread="NVIDIA/TensorRT-LLM#18023",
        wrong="A collective in a captured CUDA graph writes its window buffer at every replay, but "
        "the buffer went back to the free list when the capture ended, and others were given it.",
        cure="No window buffers are handed out while a graph is captured.",
        rule=None,
        why_not="A plan is one call: who owns bytes between two calls, or two captured graphs, is "
        "not in it.",
    ),
)  # fmt: skip
