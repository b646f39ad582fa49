"""The TLS context of our connections, one for all.

A child that is forked while another thread makes one waits for OpenSSL's locks for ever where it makes one itself.
"""

import ssl
from functools import cache

import httpx


@cache
def tls_context() -> ssl.SSLContext:
    """By the certificates of the machine, or those that SSL_CERT_FILE or SSL_CERT_DIR names."""
    return httpx.create_ssl_context()
