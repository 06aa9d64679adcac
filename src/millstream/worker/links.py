"""The ends of a stage's pipe: where its rows come from, and where what it computes goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from millstream.messages import WorkerStart
from millstream.models.arch import ModelArch
from millstream.models.load import TORCH_DTYPES
from millstream.parallel.links import HiddenReceiver, HiddenSender, TokenReceiver, TokenSender
from millstream.worker.inlet import HiddenStates, Inlet, KnownTokens, ReturnedTokens
from millstream.worker.input_batch import InputBatch
from millstream.worker.outlet import Head, NextStage, Outlet
from millstream.worker.sampler import Sampler
from millstream.worker.step_graph import StepGraph


class Ends(NamedTuple):
    """What a ModelRunner stands between."""

    inlet: Inlet
    outlet: Outlet


MakeEnds = Callable[[ModelArch, str, StepGraph, InputBatch, Sampler], Ends]
"""Makes them, of the architecture, the type that it computes in, the stage's graph, its batch and a sampler."""


def own_ends(arch: ModelArch, dtype: str, graph: StepGraph, batch: InputBatch, sampler: Sampler) -> Ends:
    """Of a model in one piece."""
    return Ends(KnownTokens(), Head(graph=graph, batch=batch, sampler=sampler))


def linked_ends(start: WorkerStart) -> MakeEnds:
    """Of one stage of several: ends of the rings that it inherited."""

    def make(arch: ModelArch, dtype: str, graph: StepGraph, batch: InputBatch, sampler: Sampler) -> Ends:
        width, torch_dtype, num_stages = arch.hidden_size, TORCH_DTYPES[dtype], len(start.layer_split)
        inlet: Inlet
        outlet: Outlet
        if start.hidden_in is None:
            assert start.tokens_in is not None, "the first stage gets tokens"
            inlet = ReturnedTokens(batch, TokenReceiver(start.tokens_in))
        else:
            inlet = HiddenStates(
                HiddenReceiver(start.hidden_in, width=width, dtype=torch_dtype, num_stages=num_stages, rank=start.rank)
            )
        if start.hidden_out is None:
            assert start.tokens_out is not None, "the last stage sends tokens"
            tokens = TokenSender(start.tokens_out)
            outlet = Head(graph=graph, batch=batch, sampler=sampler, tokens=tokens)
        else:
            outlet = NextStage(HiddenSender(start.hidden_out, width=width, dtype=torch_dtype, num_stages=num_stages))
        return Ends(inlet, outlet)

    return make
