"""A streamed chat answer with the official client: the text appears as it is generated.

    python examples/chat_stream.py "What is the capital of France?"

Needs a running server (`millstream serve`) and: pip install openai.
"""

from __future__ import annotations

import argparse

import openai


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a running server one question.")
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.base_url + "/v1", api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": args.question}],
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
