"""What the pages show, read from requests, replies, files and queries: no page is made here."""
