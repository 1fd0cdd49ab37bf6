"""Training: settings, schedule, optimiser, loop, checkpoints, metrics, report. Knows nothing of architectures."""
