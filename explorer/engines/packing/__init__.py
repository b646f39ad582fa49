"""Log-probabilities of sampled tokens alone, as packed float32, out of engines that load our plugin."""
