"""ZeRO for any PyTorch model: `megazero.initialize` and the engine it returns."""
