"""Small tasks that come with megarl, made on the spot instead of downloaded."""
