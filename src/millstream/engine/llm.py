"""Offline use: `LLM("smollm2").chat([...])`. The engine runs in this process, without sockets."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from millstream.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from millstream.engine.core import EngineCore
from millstream.engine.output_processor import OutputProcessor, RequestOutput
from millstream.executor.base import Executor, make_executor
from millstream.hub.files import resolve
from millstream.messages import EngineRequest, TokenLogprobs
from millstream.request import FinishReason, SamplingParams, nth_seed
from millstream.tokenizer.tokenizer import Tokenizer

_SETTINGS = {
    f: cls
    for cls in (ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig)
    for f in cls.__dataclass_fields__
    if f != "model"
}

Message = Mapping[str, Any]
"""{"role": "user", "content": "..."}"""


@dataclass
class Completion:
    """One answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass
class Generation:
    """A prompt's answers; the properties are those of the first (and mostly only) one."""

    prompt_token_ids: list[int]
    answers: list[Completion]
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        return self.answers[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.answers[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.answers[0].finish_reason

    def add(self, delta: RequestOutput) -> None:
        answer = self.answers[delta.index]
        answer.text += delta.text
        answer.token_ids += delta.token_ids
        answer.logprobs += delta.logprobs
        answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs


class LLM:
    """A model in this process. Settings are those of `millstream serve`, as keywords: `LLM("smollm2", threads=1)`.

    Raises ModelError or ConfigError where the model or the settings don't work.
    """

    def __init__(self, model: str = "smollm2", *, executor: Executor | None = None, **settings: Any) -> None:
        unknown = [name for name in settings if name not in _SETTINGS]
        if unknown:
            raise TypeError(f"LLM() has no setting {unknown[0]!r}; the settings are {', '.join(sorted(_SETTINGS))}")

        def chosen(cls: type) -> dict[str, Any]:
            return {name: value for name, value in settings.items() if _SETTINGS[name] is cls}

        config = EngineConfig(
            model=ModelConfig(model=model, **chosen(ModelConfig)),
            cache=CacheConfig(**chosen(CacheConfig)),
            scheduler=SchedulerConfig(**chosen(SchedulerConfig)),
            parallel=ParallelConfig(**chosen(ParallelConfig)),
        )
        files = resolve(model, cache_dir=config.model.cache_dir)
        self.tokenizer = Tokenizer.load(files, chat_template=config.model.chat_template)
        self.core = EngineCore(config, executor or make_executor(config))
        self._processor = OutputProcessor(self.tokenizer)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Generation]:
        """Continue each prompt (text or token ids); a progress bar shows when there are many.

        `params` is for all prompts, or one for each. Raises InvalidRequestError for a prompt that can't be run.
        """
        texts = [prompts] if isinstance(prompts, str) else prompts
        token_ids = [
            self.tokenizer.encode(p, add_special_tokens=True) if isinstance(p, str) else list(p) for p in texts
        ]
        return self._run(token_ids, params, progress=progress)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Generation]:
        """Answer each conversation, a list of {"role": ..., "content": ...} (or answer a single one)."""
        many: Any = [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations
        return self._run([self.tokenizer.encode_chat(m) for m in many], params, progress=progress)

    def close(self) -> None:
        """Give back memory and threads."""
        self.core.shutdown()

    def _run(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        progress: bool,
    ) -> list[Generation]:
        each = params if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts came with {len(each)} SamplingParams: give one, or one for each")
        results = [Generation(ids, [Completion() for _ in range(p.n)]) for ids, p in zip(prompts, each, strict=True)]
        open_ids: list[str] = []
        try:
            for result, p in zip(results, each, strict=True):
                open_ids += self._add(result, p)
            self._drain(len(prompts), len(open_ids), progress=progress)
        finally:
            # after an error or Ctrl-C nothing of this call goes on
            for engine_id in open_ids:
                self._processor.drop(engine_id)
                self.core.abort(engine_id)
        return results

    def _add(self, result: Generation, params: SamplingParams) -> list[str]:
        base_seed = secrets.randbits(62) if params.seed is None else params.seed
        engine_ids = []
        for index in range(params.n):
            engine_id = f"llm-{next(self._ids)}"
            answer_params = msgspec.structs.replace(params, n=1, seed=nth_seed(base_seed, index))
            self.core.add(EngineRequest(engine_id, result.prompt_token_ids, answer_params))
            self._processor.add(
                engine_id,
                request_id=engine_id,
                index=index,
                prompt_token_ids=result.prompt_token_ids,
                params=answer_params,
                sink=result.add,
            )
            engine_ids.append(engine_id)
        return engine_ids

    def _drain(self, num_prompts: int, num_answers: int, *, progress: bool) -> None:
        """Step until nothing is open."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, disable=not progress or num_prompts < 2, transient=True) as bar:
            task = bar.add_task("Answers", total=num_answers)
            while self.core.has_work:
                outputs = self.core.step()
                if outputs is None:
                    continue
                for engine_id in self._processor.process(outputs):
                    self.core.abort(engine_id, FinishReason.STOP)
                bar.update(task, completed=num_answers - self._processor.num_open)
