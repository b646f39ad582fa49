"""Task datasets: read, previewed, made of logs, augmented, selected."""
