"""How a Function of any order is made: its rules, their nesting and batching, and what it refuses."""
