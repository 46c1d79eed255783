"""megazero inside other people's scripts: those written for DeepSpeed, and transformers' Trainer."""
