"""What keeps a run of many machines going, or ends it with a reason: watchdog, stragglers, replicas, signals."""
