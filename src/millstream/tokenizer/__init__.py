"""Text to tokens and back, and chat messages to text. Imports no torch."""
