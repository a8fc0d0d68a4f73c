"""From text to batches: prepare token files, then sample them as a pure function of seed and step."""
