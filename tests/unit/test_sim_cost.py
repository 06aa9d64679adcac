"""Hardware profiles, shape cards, and what the cost model makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from millstream.config import CacheConfig, ParallelConfig
from millstream.errors import ConfigError, ModelError
from millstream.messages import SchedulerOutput
from millstream.sim.calibrate import CHUNK_TOKENS, DECODE_ROWS, LONG_CONTEXT, Probe, fit
from millstream.sim.cost import CostModel, shape_of
from millstream.sim.hardware import ShareTable, built_in_names, load_hardware
from millstream.sim.shapes import card_names, load_card, load_shape


def make_step(rows: list[tuple[int, int, bool]]) -> SchedulerOutput:
    """A step of (computed, scheduled, sampled) rows."""
    n = len(rows)
    return SchedulerOutput(
        0,
        [],
        [],
        [str(i) for i in range(n)],
        [r[0] for r in rows],
        [r[1] for r in rows],
        [[]] * n,
        [r[2] for r in rows],
    )


def flat(**changes: object) -> dict[str, object]:
    """A profile with round numbers: 1 TFLOPS, 1 GB/s, no overheads."""
    profile: dict[str, object] = {
        "name": "flat",
        "description": "round numbers",
        "sources": [],
        "peak_tflops": {"bfloat16": 1.0},
        "memory_gib": 16,
        "memory_share": 1.0,
        "bandwidth_gbs": 1.0,
        "link": "string",
        "link_gbs": 1.0,
        "link_latency_us": 0,
        "linear_compute": [[1, 1.0]],
        "linear_bandwidth": [[1, 1.0]],
        "attention_compute": 1.0,
        "attention_bandwidth": 1.0,
        "layer_us": 0,
        "step_us": 0,
        "sampled_row_us": 0,
        "host_step_us": 0,
        "host_row_us": 0,
        "return_us": 0,
        "front_end_us": 0,
    }
    return profile | changes


def make_cost(
    tmp_path: Path,
    *,
    card: str = "smollm2-135m",
    stages: int = 1,
    tp: int = 1,
    quantization: str | None = None,
    **changes: object,
) -> CostModel:
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps(flat(**changes)))
    parallel = ParallelConfig(pipeline_parallel_size=stages)
    return CostModel(
        load_card(card),
        load_hardware(str(path)),
        dtype="bfloat16",
        parallel=parallel,
        tensor_parallel_size=tp,
        quantization=quantization,
    )


# -- profiles ------------------------------------------------------------------------------------------------------


def test_all_profiles_and_cards_load() -> None:
    assert {"rtx-4090", "a100-80g", "h100-sxm", "h200", "instant"} <= set(built_in_names())
    for name in built_in_names():
        assert load_hardware(name).name == name
        assert load_hardware(name).sources
    sizes = {name: load_card(name).num_parameters() / 1e9 for name in card_names()}
    assert sizes["llama-2-7b"] == pytest.approx(6.74, abs=0.01)
    assert sizes["llama-3.1-8b"] == pytest.approx(8.03, abs=0.01)
    assert sizes["llama-3.1-70b"] == pytest.approx(70.55, abs=0.01)
    assert sizes["qwen2.5-32b"] == pytest.approx(32.76, abs=0.01)
    assert sizes["smollm2-135m"] == pytest.approx(0.1345, abs=0.0001)


def test_numbers_of_a_profile_can_be_replaced() -> None:
    plain = load_hardware("rtx-4090")
    changed = load_hardware("rtx-4090", {"compute_scale": "0.5", "link_gbs": "25"})
    assert changed.peak("bfloat16") == plain.peak("bfloat16") / 2
    assert changed.link_gbs == 25


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"speed": "1"}, "no such number"),
        ({"link_gbs": "fast"}, "must be a number"),
        ({"link_gbs": "0"}, "link_gbs is 0.0: it must be over 0"),
        ({"layer_us": "-1"}, "layer_us is -1.0: it must be at least 0"),
        ({"bandwidth_scale": "inf"}, "finite"),
    ],
)
def test_a_bad_number_is_named(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_hardware("rtx-4090", overrides)


def test_bad_profiles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be one of a100-80g, h100-sxm"):
        load_hardware("abacus")
    with pytest.raises(ConfigError, match="can't be read"):
        load_hardware(str(tmp_path / "none.json"))
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(flat(linear_compute=[[8, 0.5], [4, 0.6]])))
    with pytest.raises(ConfigError, match="rows of linear_compute"):
        load_hardware(str(path))
    path.write_text(json.dumps(flat(surprise=1)))
    with pytest.raises(ConfigError, match="surprise"):
        load_hardware(str(path))
    with pytest.raises(ConfigError, match="tells the speed of bfloat16, float16, float32 only"):
        load_hardware("h200").peak("float8")


def test_shares_run_straight_over_the_logarithm_and_are_level_outside() -> None:
    table = ShareTable([(4, 0.2), (16, 0.6)])
    assert [table(1), table(4), table(16), table(999)] == [0.2, 0.2, 0.6, 0.6]
    assert table(8) == pytest.approx(0.4)


def test_shapes_come_from_a_config_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "vocab_size": 100,
                "max_position_embeddings": 64,
            }
        )
    )
    assert load_shape(str(tmp_path)) == load_shape(str(tmp_path / "config.json"))
    assert load_shape(str(tmp_path)).num_layers == 2
    with pytest.raises(ModelError, match="there is no such file"):
        load_shape(str(tmp_path / "other.json"))
    with pytest.raises(ConfigError, match="must be one of llama"):
        load_card("gpt-9")


# -- batches -------------------------------------------------------------------------------------------------------


def test_the_shape_of_a_step() -> None:
    shape = shape_of(make_step([(10, 1, True), (20, 1, True), (5, 3, False)]))
    assert (shape.num_tokens, shape.num_rows, shape.num_sampled) == (5, 3, 2)
    assert shape.decode_reads == 11 + 21
    assert shape.chunk_reads == 8
    assert shape.chunk_pairs == 6 + 7 + 8


def test_a_window_limits_what_a_token_sees() -> None:
    shape = shape_of(make_step([(10, 1, True), (2, 4, False), (20, 2, False)]), window=4)
    assert shape.decode_reads == 4
    # tokens at 2, 3, 4, 5 see 3, 4, 4, 4; tokens at 20, 21 see 4 each
    assert shape.chunk_pairs == 15 + 8
    # the keys of the tokens themselves, and of three before the first one
    assert shape.chunk_reads == 6 + 5


# -- times ---------------------------------------------------------------------------------------------------------


def test_a_decode_is_bound_by_reading_the_weights(tmp_path: Path) -> None:
    cost = make_cost(tmp_path, peak_tflops={"bfloat16": 1000.0})
    times = cost(make_step([(0, 1, True)]))
    # 134.5 M parameters of 2 bytes at 1 GB/s; key, value and activations add under a percent
    assert times.stages[0] == pytest.approx(0.269, rel=0.01)


def test_a_chunk_is_bound_by_arithmetic(tmp_path: Path) -> None:
    cost = make_cost(tmp_path, bandwidth_gbs=1e6)
    tokens = 1000
    times = cost(make_step([(0, tokens, False)]))
    arch = cost.arch
    linear = 2 * tokens * (arch.num_parameters() - arch.vocab_size * arch.hidden_size)
    attention = arch.num_layers * 4 * arch.num_heads * arch.head_dim * tokens * (tokens + 1) / 2
    assert times.stages[0] == pytest.approx((linear + attention) / 1e12, rel=0.01)


def test_only_sampled_rows_pay_for_the_head(tmp_path: Path) -> None:
    cost = make_cost(tmp_path, sampled_row_us=1000.0)
    middle, last = (cost(make_step([(0, 100, s)])).stages[0] for s in (False, True))
    head = cost.arch.hidden_size * cost.arch.vocab_size
    assert last - middle == pytest.approx(2 * head / 1e9 + 0.001)


def test_stages_share_the_layers_and_the_last_has_the_head(tmp_path: Path) -> None:
    whole, cut = make_cost(tmp_path), make_cost(tmp_path, stages=3, step_us=100.0, link_gbs=2.0, link_latency_us=5.0)
    step = make_step([(50, 1, True), (0, 64, False)])
    one, three = whole(step), cut(step)
    assert len(three.stages) == 3
    assert sum(three.stages) == pytest.approx(one.stages[0] + 3 * 100e-6)
    assert three.send == pytest.approx(5e-6 + 65 * 576 * 2 / 2e9)


def test_tensor_parallelism_divides_the_work_and_adds_all_reduces(tmp_path: Path) -> None:
    changes = {"link_gbs": 1e9, "layer_us": 0.0}
    one = make_cost(tmp_path, card="llama-3.1-8b", **changes)
    four = make_cost(tmp_path, card="llama-3.1-8b", tp=4, **changes)
    far = make_cost(tmp_path, card="llama-3.1-8b", tp=4, **changes | {"link_latency_us": 10.0})
    step = make_step([(1000, 1, True)] * 4)
    assert four(step).stages[0] == pytest.approx(one(step).stages[0] / 4, rel=0.01)
    # 32 layers, two all-reduces, 6 hops each
    assert far(step).stages[0] - four(step).stages[0] == pytest.approx(32 * 2 * 6 * 10e-6)
    with pytest.raises(ConfigError, match="--tensor-parallel-size is 3"):
        make_cost(tmp_path, card="llama-3.1-8b", tp=3)


def test_int8_halves_the_weights_and_has_a_peak_of_its_own(tmp_path: Path) -> None:
    decode, chunk = make_step([(0, 1, True)]), make_step([(0, 1000, False)])
    params = load_card("smollm2-135m").num_parameters()

    def seconds(step: SchedulerOutput, **changes: object) -> float:
        return make_cost(tmp_path, **changes)(step).stages[0]  # type: ignore[arg-type]

    reading = {"peak_tflops": {"bfloat16": 1e6}}
    # a byte and the sixteenth part of its group's scale, at 1 GB/s; norms, keys and values are a percent of that
    assert seconds(decode, quantization="int8", **reading) == pytest.approx(params * 1.0625 / 1e9, rel=0.02)
    multiplying = {"bandwidth_gbs": 1e6}
    bfloat16 = seconds(chunk, **multiplying)
    assert seconds(chunk, quantization="int8", **multiplying) == bfloat16
    arch = load_card("smollm2-135m")
    linear = 2 * 1000 * (params - arch.vocab_size * arch.hidden_size) / 1e12
    faster = seconds(chunk, quantization="int8", peak_tflops={"bfloat16": 1.0, "int8": 4.0}, **multiplying)
    # attention stays as it was
    assert bfloat16 - faster == pytest.approx(linear * 3 / 4, rel=0.01)


def test_int8_leaves_more_for_the_kv_cache(tmp_path: Path) -> None:
    sizes = [make_cost(tmp_path, card="llama-3.1-8b", quantization=q) for q in (None, "int8")]
    plain, small = (cost.stage_weight_bytes(cost.stages[0]) for cost in sizes)
    embedding = 128256 * 4096
    assert small == pytest.approx(1.0625 * (plain / 2 - embedding) + 2 * embedding, rel=0.001)


def test_a_step_of_which_nothing_is_left_takes_no_time(tmp_path: Path) -> None:
    assert make_cost(tmp_path, stages=2, step_us=100.0)(make_step([])).stages == [0.0, 0.0]


def test_the_host_pays_for_steps_and_rows(tmp_path: Path) -> None:
    cost = make_cost(tmp_path, host_step_us=100.0, host_row_us=10.0)
    assert cost(make_step([(0, 1, True)] * 5)).host == pytest.approx(150e-6)


# -- memory --------------------------------------------------------------------------------------------------------


def test_the_kv_cache_gets_what_the_fullest_stage_leaves(tmp_path: Path) -> None:
    cost = make_cost(tmp_path, stages=3, memory_gib=1)
    info = cost.plan(CacheConfig(block_size=32), max_model_len=None)
    per_stage = [
        (2**30 - cost.stage_weight_bytes(stage)) // (stage.num_layers * 2 * 3 * 64 * 2 * 32) for stage in cost.stages
    ]
    assert info.num_blocks == min(per_stage)
    assert info.max_model_len == 8192
    assert info.kv_cache_bytes <= 3 * 2**30


@pytest.mark.parametrize("stages", [1, 3])
def test_a_set_kv_cache_is_that_of_the_whole_model(tmp_path: Path, stages: int) -> None:
    cost = make_cost(tmp_path, stages=stages)
    info = cost.plan(CacheConfig(block_size=32, kv_cache_memory=0.5), max_model_len=None)
    assert info.num_blocks == 2**29 // (30 * 2 * 3 * 64 * 2 * 32)


@pytest.mark.parametrize(
    ("changes", "cache", "max_len", "message"),
    [
        ({"memory_gib": 0.2}, {}, None, "its weights take 0.3 GiB: nothing is left for a KV cache"),
        ({}, {"kv_cache_memory": 20.0}, None, "no KV cache of 20.0 GiB fits"),
        ({}, {}, 9000, "this model's context holds 8192"),
        ({"memory_gib": 0.26}, {}, 8192, "fewer than --max-model-len"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, object], cache: dict[str, float], max_len: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_cost(tmp_path, **changes).plan(CacheConfig(**cache), max_model_len=max_len)  # type: ignore[arg-type]


# -- calibration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_calibration_finds_a_known_machine_again(tmp_path: Path, quantization: str | None) -> None:
    """Timed on a machine that obeys the cost model, the fitted profile predicts what that machine does."""
    truth = make_cost(
        tmp_path,
        quantization=quantization,
        peak_tflops={"bfloat16": 2.0, "int8": 5.0},
        bandwidth_gbs=50.0,
        linear_compute=[[1, 0.1], [64, 0.6], [512, 0.9]],
        linear_bandwidth=[[1, 0.9], [512, 0.8]],
        attention_compute=0.5,
        attention_bandwidth=0.4,
    )

    def step_of(probe: Probe) -> SchedulerOutput:
        return make_step([(probe.context, probe.num_tokens, True)] * probe.num_rows)

    profile = fit(
        truth.arch,
        "bfloat16",
        step_of,
        lambda probe: truth(step_of(probe)).stages[0],
        host=(1e-4, 1e-5),
        description="made up",
        sources=["a test"],
        memory_gib=4,
        quantization=quantization,
    )
    assert (profile.host_step_us, profile.host_row_us) == (pytest.approx(100.0), pytest.approx(10.0))
    fitted = CostModel(truth.arch, profile, dtype="bfloat16", parallel=ParallelConfig(), quantization=quantization)
    probes = [Probe(n, 1, 8) for n in DECODE_ROWS] + [Probe(1, n, 0) for n in CHUNK_TOKENS]
    probes += [Probe(12, 1, 300), Probe(16, 1, LONG_CONTEXT), Probe(1, 200, 700)]
    for probe in probes:
        step = step_of(probe)
        assert fitted(step).stages[0] == pytest.approx(truth(step).stages[0], rel=0.08), probe
    assert msgspec.convert(msgspec.to_builtins(profile), type(profile)) == profile
