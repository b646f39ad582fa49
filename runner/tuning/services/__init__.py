"""The services that train the models: joined by URL or started, and asked over HTTP."""
