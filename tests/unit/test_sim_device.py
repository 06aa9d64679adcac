"""The simulated device behind the real engine: `serve --device sim`, without the server."""

from __future__ import annotations

import pytest

from millstream.config import EngineConfig, ParallelConfig, SchedulerConfig
from millstream.engine.core import EngineCore
from millstream.hub.files import resolve
from millstream.messages import EngineRequest
from millstream.request import SamplingParams
from millstream.sim.device import make_serving_executor
from millstream.tokenizer.tokenizer import Tokenizer


@pytest.mark.parametrize(("num_steps", "is_async"), [(1, True), (8, True), (8, False)])
def test_it_answers_in_words_and_only_max_tokens_ends_an_answer(num_steps: int, is_async: bool) -> None:
    config = EngineConfig(
        parallel=ParallelConfig(pipeline_parallel_size=2),
        scheduler=SchedulerConfig(num_scheduler_steps=num_steps, async_scheduling=is_async),
    )
    executor = make_serving_executor(config, hardware="instant")
    assert executor.depth == 2
    core = EngineCore(config, executor)
    core.add(EngineRequest("a", [5] * 700, SamplingParams(max_tokens=12, seed=0)))
    tokens: list[int] = []
    reasons = []
    while core.has_work:
        outputs = core.step()
        if outputs is not None:
            tokens += [t for row in outputs.new_token_ids for t in row]
            reasons += [str(r) for r in outputs.finish_reasons if r is not None]
    text = Tokenizer.load(resolve("smollm2")).backend.decode(tokens)
    assert len(tokens) == 12 and reasons == ["length"]
    assert set(text.split()) <= {"the", "water", "turns", "wheel", "and", "stone", "grinds", "corn"}
    assert "the" in text
    core.check_integrity()
