"""Shadow runs beside a production agent."""
