"""What a backend is, and what all layers say to each other: options, errors, reports, names."""
