"""Every struct that crosses a process boundary.

API process <-> engine process: `EngineRequest`, `AbortRequests` one way, `EngineOutputs` and the like the other.
Engine process <-> workers: `SchedulerOutput` one way, `ModelRunnerOutput` the other. Both carry diffs: a request
is described once, afterwards only what changed. All are msgspec structs sent as msgpack; nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from millstream.config import EngineConfig, ServerConfig
from millstream.request import FinishReason, SamplingParams

MAX_MESSAGE_BYTES = 256 * 2**20
"""What a socket takes in one piece."""

# -- API process -> engine process ------------------------------------------------------------------------------


class EngineRequest(msgspec.Struct, array_like=True, tag="add"):
    """One generation to start (a request with n answers is n of them)."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    """With its seed set: the API process draws one where the client gave none."""
    priority: int = 0
    """Lower runs first."""
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes."""
    has_progress: bool = False
    """Whether to tell how far the prompt is while it is computed."""


class AbortRequests(msgspec.Struct, array_like=True, tag="abort"):
    """Requests to end now: the client is gone, or (reason STOP) a stop string was found in the text."""

    request_ids: list[str]
    reason: FinishReason = FinishReason.ABORT


class TraceTo(msgspec.Struct, array_like=True, tag="trace"):
    """From now on write what every stage does to this file, or to none. One that is being written goes on till then.

    The engine tells all clients in the same form where it writes to now.
    """

    path: str | None


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """A client's first message: from now on the engine can write to it."""

    takes_outputs: bool = True
    """False: it only wants to know how the engine starts and ends."""


class ClientGone(msgspec.Struct, array_like=True, tag="gone"):
    """A client has ended without a word: abort what it asked for, and take no more of it."""

    name: str


class Shutdown(msgspec.Struct, array_like=True, tag="shutdown"):
    """End the engine process."""


ToEngine = EngineRequest | AbortRequests | TraceTo | Hello | ClientGone | Shutdown

# -- engine process -> API process ------------------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position: the token itself first, then the likeliest ones, best first."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """1 for the likeliest token of the vocabulary, and so on, of the token itself."""


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of a run of prompt tokens; the first token of a prompt has none."""

    first_position: int
    logprobs: list[TokenLogprobs]


class PromptProgress(msgspec.Struct, array_like=True, frozen=True):
    """How far a prompt is computed."""

    num_computed_tokens: int
    """Those from the prefix cache included."""
    num_cached_tokens: int


class SchedulerStats(msgspec.Struct, array_like=True):
    """Gauges after a step, counters since the last message."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_step_requests: int = 0
    num_step_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_preemptions: int = 0
    step_seconds: float = 0.0
    num_first_step_requests: int = 0
    """Requests in the step that ended an idle time, else 0."""
    stage_seconds: list[float] = []
    """How long each stage computed on the step."""
    predicted_seconds: float = 0.0
    """How long the slowest of them was expected to."""


class EngineOutputs(msgspec.Struct, array_like=True, tag="outputs"):
    """What one step brought, for all requests: columns of equal length, one row for each request with news."""

    request_ids: list[str]
    new_token_ids: list[list[int]]
    finish_reasons: list[FinishReason | None]
    stop_reasons: list[int | None]
    """The stop token id that ended the request, if one did."""
    num_cached_tokens: list[int]
    """Prompt tokens that came from the prefix cache."""
    logprobs: dict[str, list[TokenLogprobs]] = {}
    """By request id: one for each new token, where asked for."""
    prompt_logprobs: dict[str, PromptLogprobs] = {}
    """By request id: of the prompt tokens that this step judged, where asked for."""
    stats: SchedulerStats | None = None
    progress: dict[str, PromptProgress] = {}
    """By request id: of prompts that got further with this step, where asked for."""


class RequestRefused(msgspec.Struct, array_like=True, tag="refused"):
    """A request that can't be run; says why. `error` is the name of a class of `millstream.errors`."""

    request_id: str
    error: str
    message: str
    param: str | None = None


class WorkerInfo(msgspec.Struct, array_like=True):
    """What a worker knows once it has loaded its weights and allocated its KV cache."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    weight_bytes: int
    kv_cache_bytes: int
    dtype: str
    phases: dict[str, float]
    """Seconds by phase of the start: import, load, kv cache, warm-up."""


class EngineProgress(msgspec.Struct, array_like=True, tag="progress"):
    """How far the weights are loaded."""

    done_bytes: int
    total_bytes: int


class EngineReady(msgspec.Struct, array_like=True, tag="ready"):
    """The engine takes requests."""

    info: WorkerInfo


class EngineFailed(msgspec.Struct, array_like=True, tag="failed"):
    """The engine can't start or go on; the process ends after this message."""

    error: str
    message: str


FromEngine = EngineOutputs | RequestRefused | EngineProgress | EngineReady | EngineFailed | TraceTo


class EngineStart(msgspec.Struct):
    """The one line on the engine process's standard input; the pipe's end tells it that its parent is gone."""

    config: EngineConfig
    address: str
    log_level: str | None = None


# -- parent process -> API process, where there are several -----------------------------------------------------


class ApiStart(msgspec.Struct):
    """The one line on an API process's standard input; another one says why the engine has ended, and the pipe's end
    that there is nothing more to serve."""

    engine: EngineConfig
    server: ServerConfig
    address: str
    """The engine's."""
    name: str
    """Of this process, as the engine knows it; never used twice."""
    place: int
    """0 for the first of `server.api_processes`, and so on."""
    channel_fd: int
    """An inherited socket: accepted connections come from it, one byte each; `LISTENING` and `READY` go into it."""


# -- engine process <-> worker ----------------------------------------------------------------------------------


class NewRequest(msgspec.Struct, array_like=True):
    """A request that the worker has not seen (or has been told to forget, when it was preempted)."""

    request_id: str
    token_ids: list[int]
    """All known tokens: the prompt, and after a preemption the output so far."""
    num_prompt_tokens: int
    sampling_params: SamplingParams
    stop_token_ids: list[int]
    """Ids not to choose before min_tokens."""
    block_ids: list[int]
    num_computed_tokens: int


class SchedulerOutput(msgspec.Struct, array_like=True, tag="step"):
    """One step: which requests, how many tokens of each, and what changed since the last step.

    Where rows want several tokens, it is the first of as many steps: the worker goes on by itself with `next_step`.
    """

    step_id: int
    """The same for all steps of one decision."""
    forget_ids: list[str]
    """Requests that are finished, aborted or preempted: drop all you keep of them, first."""
    new_requests: list[NewRequest]
    request_ids: list[str]
    """The batch, in order; the columns below follow it."""
    num_computed_tokens: list[int]
    """Where each request's tokens of this step begin."""
    num_scheduled_tokens: list[int]
    new_block_ids: list[list[int]]
    """Blocks to append to the tables of requests already known (empty for new ones)."""
    num_sampled_tokens: list[int]
    """How many next tokens are wanted, one from each step: none of any but the last chunk of a prompt."""
    num_steps: int = 1
    """This one and those that follow from it; as many as the row that wants most."""

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens)

    def next_step(self, without: Collection[str] = ()) -> SchedulerOutput | None:
        """The step that follows without a new decision: one token more for each row that wants more than one.

        `without`: requests that were forgotten since. Without them the step may have no rows; it is one all the same.
        """
        if self.num_steps == 1:
            return None
        names, starts, counts = self.request_ids, self.num_computed_tokens, self.num_scheduled_tokens
        rows = [i for i, wanted in enumerate(self.num_sampled_tokens) if wanted > 1 and names[i] not in without]
        return SchedulerOutput(
            step_id=self.step_id,
            forget_ids=[],
            new_requests=[],
            request_ids=[names[i] for i in rows],
            num_computed_tokens=[starts[i] + counts[i] for i in rows],
            num_scheduled_tokens=[1] * len(rows),
            new_block_ids=[[]] * len(rows),
            num_sampled_tokens=[self.num_sampled_tokens[i] - 1 for i in rows],
            num_steps=self.num_steps - 1,
        )


class ModelRunnerOutput(msgspec.Struct, array_like=True, tag="result"):
    """What a step brought: a list of new tokens for each row that wanted one, in the batch's order.

    Several steps of one decision are as many of these, sent as they are done.
    """

    step_id: int
    request_ids: list[str]
    new_token_ids: list[list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[str, PromptLogprobs] = {}
    stage_seconds: list[float] = []
    """How long each stage computed, first to last; waiting and handing over not counted."""
    stage_started: list[float] = []
    """When each stage began to compute, on the clock that all processes of the host share (time.monotonic)."""
    stage_send_seconds: list[float] = []
    """How long each stage took to hand over to the next; 0 for the last."""


class KVCacheSize(msgspec.Struct, array_like=True, tag="kv"):
    """How many blocks every stage allocates: the least of what the stages have room for."""

    num_blocks: int
    max_model_len: int


class Ping(msgspec.Struct, array_like=True, tag="ping"):
    """Asks an idle stage whether it still lives; it answers with a Pong."""


ToWorker = KVCacheSize | SchedulerOutput | Ping


class StagePlan(msgspec.Struct, array_like=True, tag="plan"):
    """A stage's first message: what it has room for."""

    rank: int
    num_blocks: int
    max_model_len: int


class StageProgress(msgspec.Struct, array_like=True, tag="progress"):
    """How far a stage's weights are loaded."""

    rank: int
    done_bytes: int
    total_bytes: int


class StageReady(msgspec.Struct, array_like=True, tag="ready"):
    """A stage takes steps. Bytes and phases in `info` are its own."""

    rank: int
    info: WorkerInfo


class StageFailed(msgspec.Struct, array_like=True, tag="failed"):
    """A stage can't start or go on. `error` is the name of the exception's class, `trace` its stack as text."""

    rank: int
    error: str
    message: str
    trace: str


class Pong(msgspec.Struct, array_like=True, tag="pong"):
    rank: int


FromWorker = StagePlan | StageProgress | StageReady | StageFailed | ModelRunnerOutput | Pong


class RingEnd(msgspec.Struct):
    """One end of a ring of slots between two processes (parallel/ring.py), as inherited file descriptors."""

    memory_fd: int
    filled_fd: int
    freed_fd: int
    num_slots: int
    slot_bytes: int


class WorkerStart(msgspec.Struct):
    """The one line on a worker process's standard input; the pipe's end tells it that its engine is gone."""

    config: EngineConfig
    """`threads` in it are this stage's own."""
    rank: int
    layer_split: list[int]
    """Layers of each stage."""
    cpus: list[int]
    """The cores that this stage keeps to."""
    address: str
    board_fd: int
    hidden_in: RingEnd | None = None
    hidden_out: RingEnd | None = None
    tokens_in: RingEnd | None = None
    tokens_out: RingEnd | None = None
    log_level: str | None = None


_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)
_encoder = msgspec.msgpack.Encoder()


def encode(message: ToEngine | FromEngine | ToWorker | FromWorker) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes | memoryview) -> ToEngine:
    return _to_engine.decode(data)


def decode_from_engine(data: bytes | memoryview) -> FromEngine:
    return _from_engine.decode(data)


def decode_to_worker(data: bytes | memoryview) -> ToWorker:
    return _to_worker.decode(data)


def decode_from_worker(data: bytes | memoryview) -> FromWorker:
    return _from_worker.decode(data)
