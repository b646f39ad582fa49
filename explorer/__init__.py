"""The service that answers requests, records experiences and takes feedback and new weights."""
