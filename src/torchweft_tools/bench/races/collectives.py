"""Races of ranks: collectives and messages that ranks start in different orders, or not at all."""

from __future__ import annotations

from torchweft_tools.bench.races.known_race import KnownRace

COLLECTIVES = (
    KnownRace(
        thread="NVIDIA/Megatron-LM#950",
        wrong="Parameters are gathered bucket by bucket, each started when the one before is "
        "needed; a layer that comes earlier than its bucket finds no handle, waits for nothing "
        "and uses the weights of the last step.",
        cure="A bucket that has not been started is started when its layer needs it.",
        rule="order",
        ops=("""
            gather_a   - -> - mutates a all_gather@dp two-phase
            gather_b   - -> - mutates b all_gather@dp two-phase
            gather_c   - -> - mutates c all_gather@dp two-phase
            forward_a  x,a -> h
            forward_c  h,c -> k
            forward_b  k,b -> y
        """,) * 2,
        lanes="compute on gpu; nccl on gpu via compute",
        broken=("""
            compute  issue gather_a on nccl
            compute  complete gather_a
            compute  issue gather_b on nccl
            compute  forward_a
            compute  forward_c
            compute  complete gather_b
            compute  issue gather_c on nccl
            compute  forward_b
            compute  complete gather_c
        """,) * 2,
        mended=("""
            compute  issue gather_a on nccl
            compute  complete gather_a
            compute  issue gather_b on nccl
            compute  forward_a
            compute  issue gather_c on nccl
            compute  complete gather_c
            compute  forward_c
            compute  complete gather_b
            compute  forward_b
        """,) * 2,
    ),
    KnownRace(
        thread="NVIDIA/Megatron-LM#2218",
        wrong="Gradients are kept in a set, so ranks start the reduce-scatters of their buckets in "
        "different orders.",
        cure="They are kept in a list, whose order is the same on all ranks.",
        rule="order",
        ops=(buckets := """
            scatter_a  grad_a -> a reduce_scatter@dp
            scatter_b  grad_b -> b reduce_scatter@dp
        """, buckets),
        lanes="comm on gpu",
        broken=("""
            comm  scatter_a
            comm  scatter_b
        """, """
            comm  scatter_b
            comm  scatter_a
        """),
        mended=("""
            comm  scatter_a
            comm  scatter_b
        """,) * 2,
    ),
    KnownRace(
        thread="ROCm/rccl#1600",
        wrong="Two host threads of one process launch collectives of one communicator; which comes "
        "first is chance, and another chance on the next rank.",
        cure="The launches are ordered, the same way on all ranks.",
        rule="order",
        ops=("""
            shard      grads -> part reduce_scatter@world
            replicate  stats -> mean all_reduce@world
        """,) * 2,
        lanes="thread0 on gpu; thread1 on gpu",
        broken=("""
            thread0  shard
            thread1  replicate
        """,) * 2,
        mended=("""
            thread0  shard
            thread1  wait shard
            thread1  replicate
        """,) * 2,
    ),
    KnownRace(
        thread="pytorch/pytorch#189454",
        wrong="A ring in which even ranks send first and odd ranks receive first: a pass for "
        "overlap moves the receive above the send and the barrier, which it does not know as "
        "communication, so all ranks receive first.",
        cure="The pass is switched off where such ops are: the order stays as written.",
        rule="deadlock",
        ops=("""
            barrier  - -> - barrier@ring
            from0    x -> - send@ring>1
            from1    - -> y recv@ring>1
        """, """
            barrier  - -> - barrier@ring
            from0    - -> y recv@ring>0
            from1    x -> - send@ring>0
        """),
        lanes="compute on gpu",
        broken=("""
            compute  from1
            compute  barrier
            compute  from0
        """, """
            compute  from0
            compute  barrier
            compute  from1
        """),
        mended=("""
            compute  barrier
            compute  from0
            compute  from1
        """,) * 2,
    ),
    KnownRace(
        thread="pytorch/pytorch#172668",
        wrong="Two pipeline ranks, receives moved to where they are needed: both stand in a send "
        "that ends only when the other receives.",
        cure="The lower rank of a pair posts its receives before its sends (#178815).",
        rule="deadlock",
        ops=("""
            stage0   x -> f1
            pass_f1  f1 -> - send@pp>1
            pass_f0  - -> f0 recv@pp>1
            stage2   f0 -> y
        """, """
            stage1   x -> f0
            pass_f0  f0 -> - send@pp>0
            pass_f1  - -> f1 recv@pp>0
            stage3   f1 -> y
        """),
        lanes="stage on gpu",
        broken=("""
            stage  stage0
            stage  pass_f1
            stage  pass_f0
            stage  stage2
        """, (sends := """
            stage  stage1
            stage  pass_f0
            stage  pass_f1
            stage  stage3
        """)),
        mended=("""
            stage  stage0
            stage  pass_f0
            stage  pass_f1
            stage  stage2
        """, sends),
    ),
    KnownRace(
        thread="meta-pytorch/torchrec#4149",
        wrong="Two process groups, started in different orders on two ranks, with a host that "
        "synchronises in between: each rank waits for a collective that the other starts later.",
        cure="No synchronisation between the two: both are started, then both are waited for.",
        rule="deadlock",
        ops=("""
            exchange  keys -> rows all_to_all@shard two-phase
            average   grads -> mean all_reduce@replicate two-phase
        """,) * 2,
        lanes="host on gpu; nccl on gpu via host",
        broken=("""
            host  issue exchange on nccl
            host  complete exchange
            host  issue average on nccl
            host  complete average
        """, """
            host  issue average on nccl
            host  complete average
            host  issue exchange on nccl
            host  complete exchange
        """),
        mended=("""
            host  issue exchange on nccl
            host  issue average on nccl
            host  complete exchange
            host  complete average
        """, """
            host  issue average on nccl
            host  issue exchange on nccl
            host  complete average
            host  complete exchange
        """),
    ),
    KnownRace(
        thread="pytorch/pytorch#137257",
        wrong="One-shot all-reduce has no barrier at its end: a rank writes its peer-to-peer "
        "buffer for the next collective while a slower rank still reads it for this one.",
        cure="A barrier at the end of the kernel.",
        rule=None,
        why_not="Steps of a rank touch only its own bytes. That a peer reads them, in its own "
        "time, is the inside of a collective, which has let go of its input when it ends.",
    ),
)  # fmt: skip
