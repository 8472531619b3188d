"""One layer run alone or in its turn, and what it keeps."""
