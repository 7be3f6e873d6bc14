"""The suite that every backend must pass, and what it is made of. Knows `hal` alone; needs no backend."""
