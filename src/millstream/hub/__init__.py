"""Model files: where they lie, how they are fetched, how a GGUF file's header is read. Imports no torch."""
