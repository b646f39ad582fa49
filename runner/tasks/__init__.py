"""Task datasets: read, previewed, made of logs, selected."""
