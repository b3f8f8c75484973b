"""Compute: one decoder for the Llama, Qwen and SmolLM family, its cache, and what files say of it."""
