"""Programs in 8-bit integers, admitted by what the user states and proven on held-out batches."""
