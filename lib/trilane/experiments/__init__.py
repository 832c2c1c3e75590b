"""Short runs that answer one question: a benchmark, parity of engines, a rehearsal of save and load, a bisection."""
