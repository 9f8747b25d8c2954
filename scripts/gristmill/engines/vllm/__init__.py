"""The vllm engine, an optional extra."""
