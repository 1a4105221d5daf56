"""The commands of `zorro-verl`, a module each: what they ask, and how they show what they found."""
