"""Answers without a server: the engine runs for this script alone.

python examples/offline.py
"""

from __future__ import annotations

from millstream import LLM, SamplingParams

CAPITALS = ("France", "Italy", "Japan")


def main() -> None:
    llm = LLM("smollm2")
    chats = [[{"role": "user", "content": f"What is the capital of {country}?"}] for country in CAPITALS]
    for country, output in zip(CAPITALS, llm.chat(chats, SamplingParams(temperature=0, max_tokens=40)), strict=True):
        print(f"{country}: {output.text.strip()} ({len(output.token_ids)} tokens, {output.finish_reason})")

    (story,) = llm.generate(
        ["Once upon a time there was a mill"], SamplingParams(temperature=0.8, seed=1, max_tokens=60)
    )
    print(f"Once upon a time there was a mill{story.text}")


if __name__ == "__main__":
    main()
