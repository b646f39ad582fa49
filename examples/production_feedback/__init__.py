"""A FastAPI app whose users' thumbs train the model that answers them."""
