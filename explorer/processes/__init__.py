"""The processes of the service: control process and workers, the channel between them, engines kept running."""
