"""ChatCodec: conversations as token ids: the first prompt, and the piece between two sampled turns."""
