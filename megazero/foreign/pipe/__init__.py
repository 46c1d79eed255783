"""A user's layers as a pipeline: the module, its stage for the executor, the engine."""
