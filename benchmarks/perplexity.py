"""What a number format costs in quality: the perplexity of texts, by format, through the engine itself.

    python benchmarks/perplexity.py --model smollm2 [TEXT ...]

Each text (default: this repository's licence and documentation) is cut into windows of `--window` tokens; each window's
tokens but the first are judged. Perplexity is exp of their mean negative log-probability. The last column compares with
the first format's.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from millstream import LLM, SamplingParams

ROOT = Path(__file__).parents[1]
DEFAULT_TEXTS = (ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md")))
FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}


def nll(llm: LLM, texts: list[str], window: int) -> tuple[float, int]:
    """Summed negative log-probability in nats, and over how many tokens."""
    windows = []
    for text in texts:
        token_ids = llm.tokenizer.encode(text, add_special_tokens=False)
        windows += [token_ids[i : i + window] for i in range(0, len(token_ids), window)]
    windows = [w for w in windows if len(w) > 1]
    found = llm.generate(windows, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), progress=False)
    judged = [step.logprobs[0] for generation in found for step in generation.prompt_logprobs or []]
    return -math.fsum(judged), len(judged)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", type=Path, default=DEFAULT_TEXTS, metavar="TEXT")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    args = parser.parse_args()
    texts = [path.read_text() for path in args.texts]
    print(f"{'format':10} {'tokens':>8} {'perplexity':>11} {'against first':>14}")
    first = None
    for name in args.formats:
        llm = LLM(args.model, max_model_len=args.window + 1, kv_cache_memory=0.5, **FORMATS[name])
        total, count = nll(llm, texts, args.window)
        llm.close()
        perplexity = math.exp(total / count)
        first = first or perplexity
        print(f"{name:10} {count:8} {perplexity:11.4f} {perplexity / first - 1:+13.2%}", flush=True)


if __name__ == "__main__":
    main()
