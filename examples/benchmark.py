"""Sixteen chat requests at once: answers are printed as they finish, then what all of them took.

    python examples/benchmark.py --base-url http://127.0.0.1:8000

Needs a running server (any that speaks OpenAI's API) and the official client: pip install openai.

The seconds, all on the client's clock:
  a request's line   decoding: from its own first token to its end
  Prefilling         from the moment all requests are sent to the last request's first token. If the server runs fewer
                     requests at once than are sent, this holds the wait for a place too
  Decoding           from the first token of any request to the end of the last answer; the rate is all generated tokens
                     by these seconds. The two spans overlap where a request decodes while another still waits for its
                     first token: no token is counted against less time than it took
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass

import openai

QUESTIONS = (
    "Explain how to best learn Rust.",
    "Please talk about deep learning in 100 words.",
    "Do you know the capital city of China? Talk the details of you known.",
    "Who is the best female actor in the world? Explain why.",
    "How to dealing with depression?",
    "How to make money in short time?",
    "What is the future trend of large language model?",
    "The famous tech companies in the world.",
)


@dataclass(kw_only=True)
class Answer:
    """One streamed answer. Times are seconds of `time.perf_counter`."""

    question: str
    request_id: str = ""
    text: str = ""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    first_token: float = 0.0
    end: float = 0.0


async def ask(client: openai.AsyncOpenAI, question: str, *, model: str, max_tokens: int) -> Answer:
    """Ask, read the stream to its end and print the answer."""
    answer = Answer(question=question)
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        answer.request_id = chunk.id
        for choice in chunk.choices:
            if choice.delta.content:
                answer.first_token = answer.first_token or time.perf_counter()
                answer.text += choice.delta.content
        if chunk.usage is not None:
            answer.num_prompt_tokens = chunk.usage.prompt_tokens
            answer.num_tokens = chunk.usage.completion_tokens
    answer.end = time.perf_counter()
    answer.first_token = answer.first_token or answer.end
    seconds = answer.end - answer.first_token
    print(f"\nRequest {answer.request_id} decoding finished in {seconds:.1f} seconds\n")
    print(f"{question}\n\n{answer.text.strip()}\n", flush=True)
    return answer


async def main(args: argparse.Namespace) -> int:
    # Retries would be counted as slow answers.
    async with openai.AsyncOpenAI(
        base_url=args.base_url.rstrip("/").removesuffix("/v1") + "/v1",
        api_key=args.api_key,
        max_retries=0,
        timeout=3600,
    ) as client:
        model = args.model
        try:
            if model is None:
                model = (await client.models.list()).data[0].id
        except openai.OpenAIError as e:
            print(f"error: {args.base_url}: {e}", file=sys.stderr)
            return 1
        questions = [QUESTIONS[i % len(QUESTIONS)] for i in range(args.batch)]
        begin = time.perf_counter()
        results = await asyncio.gather(
            *(ask(client, q, model=model, max_tokens=args.max_tokens) for q in questions), return_exceptions=True
        )
    answers = [r for r in results if isinstance(r, Answer)]
    for question, result in zip(questions, results, strict=True):
        if isinstance(result, BaseException):
            print(f"error: {question!r} was not answered: {result}", file=sys.stderr)
    if answers:
        print_totals(answers, begin=begin)
    return 0 if len(answers) == len(results) else 1


def print_totals(answers: list[Answer], *, begin: float) -> None:
    n = len(answers)
    num_prompt_tokens = sum(a.num_prompt_tokens for a in answers)
    num_tokens = sum(a.num_tokens for a in answers)
    prefill = max(a.first_token for a in answers) - begin
    decode = max(a.end for a in answers) - min(a.first_token for a in answers)
    rate = num_tokens / decode if decode > 0 else 0.0
    print(f"[{n} requests] Prefilling: {num_prompt_tokens} prompt tokens processed in {prefill:.2f} seconds\n")
    print(f"[{n} requests] Decoding: {num_tokens} tokens processed in {decode:.2f} seconds ({rate:.0f} tokens/s)")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--model", help="model to ask (default: the server's first)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest answer, in tokens (default: %(default)s)")
    parser.add_argument("--api-key", default="none", help="where the server wants one")
    parser.add_argument("--batch", type=int, default=16, help="requests sent at once (default: %(default)s)")
    args = parser.parse_args()
    if args.batch < 1 or args.max_tokens < 1:
        parser.error("--batch and --max-tokens must be at least 1")
    return args


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parse_args())))
