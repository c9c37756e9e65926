"""Predictions: what a config and a machine's name come to, without weights, torch or a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchweft.errors import MachineError, WeftError
from torchweft.files import write_json
from torchweft.plan.strategies import get_strategy, sequential, strategy_names
from torchweft_tools.bench import predictions
from torchweft_tools.bench.predictions.published import Figure, known_model, read_figure
from torchweft_tools.cli import app as cli
from torchweft_tools.predict import prediction
from torchweft_tools.predict.hardware import load_hardware, machine_files
from torchweft_tools.predict.model_graph import model_graph
from torchweft_tools.predict.prediction import Call, get_engine, predict, run
from torchweft_tools.predict.prices import GpuCosts
from torchweft_tools.predict.products import product_s
from torchweft_tools.predict.shape import ConfigError, known_configs, load_shape, read_shape
from torchweft_tools.predict.tables import MeasuredTimes, load_times
from torchweft_tools.predict.work import ModelLayout, OpWork, Workload, read_parallel, workload

TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 12, "vocab_size": 32000,
    "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 2816,
    "rope_scaling": None, "a_field_of_tomorrow": [1],
}  # fmt: skip
BILLIONS = {
    "llama-3-8b": 8.03, "llama-2-70b": 68.98, "qwen2.5-72b": 72.7, "mixtral-8x22b": 140.6,
    "deepseek-v2-lite": 15.7, "deepseek-v3": 671.0, "qwen3-30b-a3b": 30.5, "phi-3.5-moe": 41.9,
    "qwen1.5-moe-a2.7b": 14.3, "gpt-3-175b": 175.2,
}  # fmt: skip


def call(model: str = "llama-3-8b", machine: str = "8xh100", parallel: str = "tp=8",
         load: Workload | None = None, engine: str = "eager", **more: Any) -> Call:  # fmt: skip
    return Call(load_shape(model), load or Workload(1, 2048), read_parallel(parallel),
                load_hardware(machine), get_engine(engine), **more)  # fmt: skip


def seconds(*args: Any, strategy: str = "sequential", **facts: Any) -> float:
    return run(call(*args, **facts), get_strategy(strategy), bounded=False).makespan_s


def failure(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.run(["predict", *words, "--json"]) == 1
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    assert isinstance(message, str)
    return message


@pytest.mark.parametrize("model", BILLIONS)
def test_weights_of_a_graph_are_those_of_the_model(model: str) -> None:
    shape = load_shape(model)
    drawn = model_graph(shape, Workload(1, 8), ModelLayout(), load_hardware("gb200"))
    sizes = [v.bytes.constant or 0 for v in drawn.graph.values if v.name.startswith("w.")]
    count = sum(sizes) / shape.weight_bytes + shape.hidden * shape.vocab  # the embedding
    assert count / 1e9 == pytest.approx(BILLIONS[model], rel=0.01)


def test_all_configs_are_read_and_products_are_twice_their_weights() -> None:
    for name in known_configs():
        shape = load_shape(name)
        assert shape.num_layers >= 24
        if shape.experts is None:
            drawn = model_graph(shape, Workload(1, 64), ModelLayout(), load_hardware("h100"))
            ops = [op for op in drawn.graph.ops if op.mark != "attention"]
            flops = sum(op.flops.evaluate({"s0": 64}) for op in ops)
            own = [name for name in drawn.graph.inputs if name.startswith("w.layers")]
            weights = sum(drawn.graph.value[name].bytes.constant or 0 for name in own)
            assert flops == pytest.approx(64 * weights, rel=0.05), name  # bfloat16: 2 bytes each


@pytest.mark.parametrize("strategy", sorted({*strategy_names()} - {"auto", "replay", "searched"}))
@pytest.mark.parametrize(
    ("model", "parallel", "machine", "phase"),
    [
        ("llama-3-8b", "tp=8", "8xh100", "prefill"),
        ("mixtral-8x7b", "tp=4", "4xl20-pcie", "prefill"),
        ("mixtral-8x7b", "tp=8,ep=8", "8xb200", "decode"),
        ("deepseek-v3", "ep=16", "2x8xh20", "prefill"),
        ("deepseek-v2-lite", "dp=4,tp=2,ep=8", "8xa100", "decode"),
    ],
)
def test_every_strategy_writes_a_safe_plan_for_every_kind_of_model(
    strategy: str, model: str, parallel: str, machine: str, phase: str
) -> None:
    load = Workload(16, 1, 512, "decode") if phase == "decode" else Workload(2, 512)
    one = call(model, machine, parallel, load)
    num_layers = one.shape.num_dense % one.shape.num_layers + 2
    simulated = prediction._PlannedLayers(one, get_strategy(strategy), num_layers)  # it verifies
    assert len(simulated.plan.graph.ops) >= 9 * num_layers
    assert simulated.totals(1.0).makespan_s > 0


def test_ops_know_where_they_are_and_collectives_who_talks() -> None:
    one = call("deepseek-v3", "4x8xh100", "ep=32", Workload(1, 256))
    graph = one.draw(5).graph
    marks = {op.mark for op in graph.ops if op.layer == 4}
    assert {"attention", "norm", "dispatch", "experts", "combine", "router"} <= marks
    op = graph.op["layers.4.mlp.dispatch"]
    assert (op.path, op.layer, op.uses, op.two_phase) == ("layers.4.mlp", 4, "network", True)
    assert op.collective is not None
    assert len(graph.members(op.collective.communicator, 1)) == 32
    assert not [each for each in graph.ops if each.layer == 2 and each.mark == "experts"]
    bodies = [op.body for op in graph.ops if op.layer == 3]
    assert bodies == [op.body for op in graph.ops if op.layer == 4]


def test_ranks_of_one_group_share_its_tokens_among_experts() -> None:
    """As many tokens in all: 8 groups of one rank, or 2 groups of 4."""
    loads = {"ep=8": Workload(1, 1024), "tp=4,dp=2,ep=8": Workload(1, 4096)}
    drawn = [call("mixtral-8x7b", "8xh20", text, load).draw(2) for text, load in loads.items()]
    rows = [each.works["mlp.experts"].rows * load.num_tokens
            for each, load in zip(drawn, loads.values(), strict=True)]  # fmt: skip
    assert rows[0] == rows[1]
    sent = [each.works["mlp.dispatch"].near_bytes * load.num_tokens
            for each, load in zip(drawn, loads.values(), strict=True)]  # fmt: skip
    assert sent[0] == pytest.approx(sent[1])
    assert "layers.1.mlp.all_gather" in drawn[1].graph.op
    assert "layers.1.mlp.all_gather" not in drawn[0].graph.op


def test_a_few_layers_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    few = run(call(), get_strategy("overlap"), bounded=False)
    monkeypatch.setattr(prediction, "NUM_LAYERS", 100)
    every = run(call(), get_strategy("overlap"), bounded=False)
    assert few.makespan_s == pytest.approx(every.makespan_s, rel=0.01)
    assert few.network_s == pytest.approx(every.network_s, rel=0.01)
    assert few.peak_bytes == pytest.approx(every.peak_bytes, rel=0.01)


def test_no_plan_beats_its_bound_and_the_dict_has_all_fields() -> None:
    found = predict(call(load=Workload(1, 700), engine="bare"), get_strategy("overlap"))
    data = found.data()
    assert list(data) == ["makespan_s", "sequential_s", "speedup", "exposed_s", "hidden_share",
                          "bound_s", "peak_bytes", "simulated"]  # fmt: skip
    assert 0 < data["bound_s"] <= data["makespan_s"]
    assert data["speedup"] == data["sequential_s"] / data["makespan_s"]
    assert 0 <= data["hidden_share"] <= 1
    assert data["peak_bytes"] > 8.03e9 * 2 / 8


def test_faster_machines_and_less_work_take_less_time() -> None:
    times = [seconds(machine=name) for name in ("8xb200", "8xh100", "8xa100", "8xl20-pcie")]
    assert times == sorted(times)
    assert seconds(load=Workload(1, 1024)) < seconds(load=Workload(1, 2048))
    assert seconds(load=Workload(2, 2048)) < seconds(load=Workload(1, 4096))  # shorter contexts
    assert seconds(algorithm="multimem") < seconds(algorithm="ring")
    assert seconds(without=("all_reduce",)) < seconds()
    near, far = (
        seconds(parallel="tp=16", machine="16xgb200"),
        seconds(parallel="tp=16", machine="2x8xb200"),
    )
    assert near < far < seconds(parallel="tp=16", machine="2x8xb200-ethernet")
    long, short = (seconds(load=Workload(64, 1, n, "decode"), engine="graphs") for n in (8192, 256))
    assert short < long


def test_products_come_in_whole_waves() -> None:
    hardware = load_hardware("h100")
    costs = GpuCosts(hardware.machine, hardware=hardware)
    work = OpWork("matmul", 8192, 8448)  # 33 tiles of 256 columns: four rows of tiles are a wave
    one, full, over = (costs.product_s(work, rows) for rows in (480, 512, 513))
    assert one == full
    assert over > 1.1 * full
    few, many = (costs.work_s(replace(work, kind="experts", experts=each), 64) for each in (2, 60))
    assert many > 5 * few  # all weights are read, whatever the rows


def test_power_slows_products_where_they_draw_more_than_the_limit() -> None:
    hot = run(call(load=Workload(1, 8192)), sequential, bounded=False)
    cool = run(call(machine="8xh20", load=Workload(1, 8192)), sequential, bounded=False)
    assert 0.8 < hot.clock < 1.0
    assert cool.clock == 1.0


def test_a_fused_kernel_is_more_than_overlap() -> None:
    hardware, sizes = load_hardware("8xl20-pcie"), (4096, 12288, 49152)
    parts = [product_s(hardware, MeasuredTimes(), sizes, "all_gather", 8, part=part)
             for part in ("product", "collective")]  # fmt: skip
    plain = product_s(hardware, MeasuredTimes(), sizes, "all_gather", 8)
    fused = product_s(hardware, MeasuredTimes(), sizes, "all_gather", 8, fused=True)
    assert plain == pytest.approx(sum(parts), rel=0.01)
    assert parts[0] < fused < max(parts)  # it needs no ring


def test_a_kernel_for_all_reduce_and_norm_saves_the_norm_even_one_by_one() -> None:
    plain, fused = call(), call(fused=True)
    assert not [op for op in fused.draw(3).graph.ops if op.mark == "all_reduce"]
    owed = [op for op in fused.draw(3).graph.ops if op.mark == "all_reduce_norm"]
    assert len(owed) == 6  # the first norm has nothing to sum up, the last one has
    assert all(op.two_phase and op.uses == "network" for op in owed)
    assert len(plain.draw(3).graph.ops) - len(fused.draw(3).graph.ops) == 6
    times = [run(each, sequential, bounded=False).makespan_s for each in (plain, fused)]
    found = predict(fused, get_strategy("overlap"), bounded=False)
    assert found.makespan_s < times[1] < times[0]
    assert found.sequential_s == times[0]  # the baseline has no such kernel
    alone = run(call(parallel="tp=1", machine="h100", fused=True), sequential, bounded=False)
    assert alone.network_s == 0


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b", "deepseek-v2-lite"])
def test_blocks_take_what_their_kernels_take(model: str) -> None:
    ways = [call(model, parallel="tp=4", grain=grain) for grain in ("kernels", "blocks")]
    kernels, blocks = (run(way, sequential, bounded=False) for way in ways)
    assert blocks.makespan_s == pytest.approx(kernels.makespan_s, rel=1e-6)
    assert blocks.clock == pytest.approx(kernels.clock, rel=1e-6)
    coarse = ways[1].draw(4).graph
    assert len(coarse.ops) < len(ways[0].draw(4).graph.ops) / 2
    assert not [op for op in coarse.ops if op.mark == "all_reduce" and op.uses != "network"]
    overlap = get_strategy("overlap")
    both = [run(way, overlap, bounded=False).makespan_s for way in ways]
    auto = run(replace(ways[0], grain="auto"), overlap, bounded=False)
    assert auto.makespan_s == min(both)


def test_measured_times_come_first_and_only_where_they_reach() -> None:
    row = {"gpu": "H100 SXM (DGX)", "num_gpus": "8", "parallelism": "TP8 shard", "notes": "[A]",
           "params_note": "hidden 8192 ffn 28672 kv 8; fp16", "metric": "time_ms"}  # fmt: skip
    rows = [{**row, "phase": "op microbench: mlp_up_proj", "method": "m", "tokens": tokens,
             "value": value} for tokens, value in (("1024", "3"), ("2048", "5"))]  # fmt: skip
    rows += [{**row, "phase": "collective microbench", "method": "NCCL all-reduce",
              "tokens": f"{size} bytes", "value": "7"} for size in (1000, 10**9)]  # fmt: skip
    times, hardware = load_times(rows), load_hardware("8xh100")
    costs = GpuCosts(hardware.machine, hardware=hardware, measured=times, algorithm="ring")
    work = OpWork("matmul", 8192, 7168)
    assert costs.work_s(work, 1536) == pytest.approx(4e-3)
    assert costs.work_s(work, 4096) < 1e-3
    assert costs.collective_s("all_reduce", 10**6, 8) == pytest.approx(7e-3)
    assert costs.collective_s("all_reduce", 10**6, 4) < 1e-3
    other = load_hardware("8xa100")
    assert GpuCosts(other.machine, hardware=other, measured=times).work_s(work, 1536) < 1e-3


def test_machine_files_say_where_they_come_from() -> None:
    assert {"a100", "h100", "h20", "l20", "b200"} <= set(machine_files())
    for name in machine_files():
        hardware = load_hardware(f"8x{name}")
        assert len(hardware.sources) > 1
        assert hardware.device.num_sms
        assert 0 < hardware.device.network_share < 0.25
    assert load_hardware("2x8xh100").num_nodes == 2
    assert load_hardware("4xl20-pcie").gpu == "l20"
    assert load_hardware("8xh100-nvlink").gpu == "h100"
    assert load_hardware("8xh100-pcie").prices.link == "pcie"


@pytest.mark.parametrize(
    ("name", "says"),
    [("8xh101", "h100"), ("h100x8", "unknown GPU"), ("0xh100", "no GPU"), ("8 h100", "8xh100"),
     ("8xl20-nvlink", "l20")],
)  # fmt: skip
def test_a_wrong_machine_lists_the_choices(name: str, says: str) -> None:
    with pytest.raises(MachineError, match=says):
        load_hardware(name)


def test_a_broken_machine_file_names_the_field(tmp_path: Path) -> None:
    data = json.loads(machine_files()["h100"].read_text())
    path = tmp_path / "mine.json"
    write_json(path, data)
    assert load_hardware(str(path)).prices == load_hardware("8xh100").prices
    data["prices"]["matmul_shore"] = 1
    write_json(tmp_path / "bad.json", data)
    with pytest.raises(MachineError, match="matmul_shore"):
        load_hardware(str(tmp_path / "bad.json"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": None}, "'hidden_size'"),
        ({"num_hidden_layers": None}, "'num_hidden_layers'"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_size": 1000, "num_attention_heads": 16}, "head_dim"),
        ({"intermediate_size": None}, "'intermediate_size"),
        ({"num_local_experts": 8}, "'num_experts_per_tok'"),
        ({"num_local_experts": 8, "num_experts_per_tok": 9}, "9 of 8"),
        ({"kv_lora_rank": 512}, "'qk_nope_head_dim'"),
    ],
)
def test_a_config_without_a_dimension_is_refused_by_its_name(
    change: dict[str, Any], says: str
) -> None:
    read_shape(TINY)
    data = {name: value for name, value in {**TINY, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=says):
        read_shape(data)


def test_configs_of_many_makers_are_read() -> None:
    inner = read_shape({"text_config": TINY, "vision_config": {}})
    assert (inner.hidden, inner.kv_heads, inner.head_dim) == (1024, 4, 64)
    old = read_shape({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
                      "vocab_size": 50257})  # fmt: skip
    assert (old.mlp, old.gated, old.kv_heads) == (3072, False, 12)
    fp8 = read_shape({**TINY, "quantization_config": {"quant_method": "fp8"}})
    assert (fp8.weight_bytes, fp8.product_dtype) == (1, "float8_e4m3fn")
    awq = read_shape({**TINY, "quantization_config": {"quant_method": "awq"}})
    assert (awq.weight_bytes, awq.product_dtype) == (0.5, "bfloat16")
    sparse = read_shape({**TINY, "num_experts": 8, "num_experts_per_tok": 2,
                         "moe_intermediate_size": 512, "decoder_sparse_step": 2})  # fmt: skip
    assert sparse.num_dense == 6


@pytest.mark.parametrize("text", ["tp=0", "pp=2", "tp=2,ep=8,dp=2", "tp", "tp=x"])
def test_a_layout_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(WeftError, match="parallel"):
        read_parallel(text)


def test_workloads_have_one_meaning() -> None:
    assert read_parallel("ep=32") == ModelLayout(1, 32, 32)
    assert read_parallel("tp=8 ep=8") == ModelLayout(8, 1, 8)
    assert workload("prefill", 4096, None, None) == Workload(1, 4096)
    assert workload("prefill", 4096, 2, None) == Workload(2, 2048)
    assert workload("prefill", None, 2, 512).num_tokens == 1024
    assert workload("decode", None, 64, 2000) == Workload(64, 1, 2000, "decode")
    for wrong in [("prefill", 100, 3, None), ("decode", 8, 9, None), ("prefill", None, None, None),
                  ("train", 8, None, None), ("prefill", 0, None, None)]:  # fmt: skip
        with pytest.raises(WeftError):
            workload(*wrong)


def test_the_command_prints_one_object_and_clear_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEFT_DATA", raising=False)
    monkeypatch.delenv("WEFT_DEBUG", raising=False)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    own = ["--config", str(tmp_path / "config.json")]
    words = [*own, "--machine", "2xh20", "--parallel", "tp=2", "--tokens", "300"]
    assert cli.run(["predict", *words, "--strategy", "overlap", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["simulated"] is True
    assert (data["num_parts"], data["measured"]) == (2, False)
    assert cli.run(["predict", *words]) == 0
    assert "simulated" in capsys.readouterr().out
    assert cli.run(["predict", "--machines"]) == 0
    assert "b200" in capsys.readouterr().out
    assert "8 GPUs" not in failure(*words[:-2], "--tokens", "0", capsys=capsys)
    assert "has 2 GPUs" in failure(*words[:4], "--parallel", "tp=4", "--tokens", "9", capsys=capsys)
    assert "does not divide" in failure(
        *own, "--machine", "8xh20", "--parallel", "tp=3", "--tokens", "9", capsys=capsys
    )
    assert "no experts" in failure(
        *own, "--machine", "8xh20", "--parallel", "ep=8", "--tokens", "9", capsys=capsys
    )
    assert "give --machine" in failure(*own, capsys=capsys)
    assert "Known: deepseek-v2" in failure("--machine", "h20", capsys=capsys)
    assert "sequential" in failure(*words, "--strategy", "sequentiel", capsys=capsys)
    assert "blocks" in failure(*words, "--grain", "fine", capsys=capsys)
    assert "eager" in failure(*words, "--engine", "lazy", capsys=capsys)
    assert "WEFT_DATA" in failure(*words, "--data", str(tmp_path), capsys=capsys)
    assert "all_reduce" in failure(*words, "--without", "reduce", capsys=capsys)


def test_a_prediction_loads_no_torch() -> None:
    code = (
        "import sys\nfrom torchweft_tools.cli.app import run\n"
        "code = run('predict --config qwen3-8b --machine h20 --tokens 99'.split())\n"
        "sys.exit(code or ('torch' in sys.modules and 9))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


HEAD = ("id,model,params_note,gpu,num_gpus,link,parallelism,phase,batch,seq,tokens,baseline,method,"
        "metric,value,notes")  # fmt: skip
FIGURES = """
B,Qwen/Qwen2.5-7B-Base,,H20 96GB,8,NVLink,TP4,prefill,1,,4k,plain,plain: vanilla,latency_ms,100,[A]
C,Qwen2.5-7B,bf16,H20,8,NVLink,TP4,prefill,1,,4k,plain,no communication at all,latency_ms,50,[F] x
D,Qwen2.5-7B,bf16,H20,8,NVLink,TP4,prefill,1,,4k,plain,plain: vanilla,latency_ms,100,[H] x
E,Qwen2.5-7B,bf16,TPU v5,8,ICI,TP4,prefill,1,,4k,plain,plain: vanilla,latency_ms,100,[A] x
F,NoSuchModel-9B,bf16,H20,8,NVLink,TP4,prefill,1,,4k,plain,plain: vanilla,latency_ms,100,[A] x
G,Qwen2.5-7B,bf16,H20,8,NVLink,TP4,prefill,1,,4k,plain,a trick of tomorrow,latency_ms,100,[A] x
H,Qwen2.5-7B,bf16,H20,not stated,NVLink,TP4,prefill,1,,4k,plain,plain,latency_ms,100,[A] x
I,Qwen2.5-7B,bf16,H20,8,NVLink,TP4,prefill,1,,,plain,vanilla,tokens_per_s,100,[A] x
"""


def test_figures_of_others_are_read_or_left_out_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "calibration.csv").write_text(
        HEAD + FIGURES.replace("plain: ", "no ")
    )
    with pytest.raises(WeftError, match="WEFT_DATA"):
        predictions.run(data=str(tmp_path / "published"))
    rows, summary = predictions.run(data=str(tmp_path))
    reasons = {row["id"]: row["excluded"] for row in rows}
    assert reasons["B"] is None
    assert reasons["C"] is None
    words = {"D": "headline", "E": "TPU", "F": "NoSuchModel", "G": "tomorrow", "H": "not stated",
             "I": "tokens_per_s"}  # fmt: skip
    assert all(word in (reasons[name] or "") for name, word in words.items())
    assert (summary["rows"], summary["excluded"]) == (2, 6)
    first = rows[0]
    assert first["predicted_s"] == first["predicted_s_with_tables"]
    assert first["error"] == pytest.approx(first["predicted_s"] / 0.1 - 1)


def test_a_row_is_compared_with_its_own_baseline() -> None:
    rows = [dict(zip(HEAD.split(","), line.split(","), strict=True))
            for line in FIGURES.replace("plain,plain: vanilla", "no trick,no trick at all")
            .strip().splitlines()[:2]]  # fmt: skip
    base, other = (read_figure(row) for row in rows)
    assert isinstance(base, Figure)
    assert isinstance(other, Figure)
    assert (base.is_baseline, other.is_baseline) == (True, False)
    assert (base.model, base.machine, base.load) == ("qwen2.5-7b", "h20", Workload(1, 4096))
    assert other.without == ("all_reduce", "all_to_all")
    told = [{"excluded": None, "published_s": s, "predicted_s": p, "predicted_s_with_tables": p,
             "speedup": None, "predicted_speedup": None, "predicted_speedup_with_tables": None,
             "error": 0.1, "error_with_tables": 0.2}
            for s, p in ((3.0, 2.0), (1.5, 2.5))]  # fmt: skip
    other = replace(other, load=base.load)
    predictions._add_speedups(told, [base, other])
    assert (told[1]["speedup"], told[1]["predicted_speedup"]) == (2.0, 0.8)
    facts = predictions.summary(told)
    assert facts["median_speedup_points"] == pytest.approx(120)
    assert facts["signs_right"] == 0.0


@pytest.mark.parametrize(
    ("name", "model"),
    [("Llama-3.3-70B-Instruct", "llama-3-70b"), ("meta-llama/Llama-2-70b-hf", "llama-2-70b"),
     ("DeepSeek-V3/R1", "deepseek-v3"), ("Mixtral-8x22B", "mixtral-8x22b"), ("Yi-34B", None)],
)  # fmt: skip
def test_published_names_of_models(name: str, model: str | None) -> None:
    assert known_model(name) == model
