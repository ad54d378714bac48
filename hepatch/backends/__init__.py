"""How a model's forward is expressed inside a region. One backend a file."""
