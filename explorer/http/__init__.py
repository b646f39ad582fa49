"""The HTTP server: uvicorn with fast routes, request bodies, errors."""
