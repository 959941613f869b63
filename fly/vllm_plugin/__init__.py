"""fly's rules inside vLLM: a plugin that verifies in the place of vLLM's rejection sampler.

vLLM calls `register` in each of its processes (entry point group vllm.general_plugins). It changes
nothing unless vLLM's additional_config has the key "fly". docs/vllm.md shows both ways to set it.
"""
