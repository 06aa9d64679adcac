"""The benchmark client: sends requests to any OpenAI-compatible server and prints the `Serving Benchmark Result`."""
