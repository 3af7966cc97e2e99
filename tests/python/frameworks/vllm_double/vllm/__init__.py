"""Test double of vLLM: modules, classes and methods that tandem.vllm_plugin uses, with the names and
signatures that they have at vLLM's commits 00b5a01d and 089eca13."""
