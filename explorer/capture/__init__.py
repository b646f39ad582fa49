"""What is kept of a request and its reply, and the spool that it is written to before it is acknowledged."""
